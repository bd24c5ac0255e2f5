"""Communication that is counted: `from common import comm`, then `comm.all_reduce(x, group)`."""

from common.comm.calls import all_gather as all_gather
from common.comm.calls import all_gather_into as all_gather_into
from common.comm.calls import all_reduce as all_reduce
from common.comm.calls import all_to_all as all_to_all
from common.comm.calls import all_to_all_into as all_to_all_into
from common.comm.calls import all_to_all_views as all_to_all_views
from common.comm.calls import barrier as barrier
from common.comm.calls import broadcast as broadcast
from common.comm.calls import everyones as everyones
from common.comm.calls import exchange as exchange
from common.comm.calls import padded as padded
from common.comm.calls import recv as recv
from common.comm.calls import reduce as reduce
from common.comm.calls import reduce_scatter as reduce_scatter
from common.comm.calls import reduce_scatter_into as reduce_scatter_into
from common.comm.calls import send as send
from common.comm.calls import shift as shift
from common.comm.calls import sizes_of as sizes_of
from common.comm.group import Group as Group
from common.comm.travel import Pending as Pending
from common.comm.travel import blocked_in as blocked_in
from common.comm.travel import share as share
