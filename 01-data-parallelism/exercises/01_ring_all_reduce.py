"""Ring all-reduce from send and receive.

Every rank holds a vector x of the same length; afterwards each of them holds the sum over all ranks. Write it with
neighbour messages alone, in two halves:

    reduce-scatter   n - 1 rounds: each rank passes a partial sum of one chunk to the right and adds what comes from
                     the left; then rank r holds one chunk that is complete
    all-gather       n - 1 rounds: the complete chunks go around

      chunk sums after the first half, n = 3      rank 0: . S .      rank 1: . . S      rank 2: S . .

Use `comm.exchange(out_message, received, group, dst, src)`: it sends one tensor to rank dst of the group while it
receives into another from rank src, so that no order of ranks can wait for itself. `group.rank` and `group.size`
are this rank's place and the number of ranks. The length need not divide by the number of ranks.

Targets: the sum on every rank, x unchanged, 2(n-1) messages, 2(n-1)/n of the bytes of x where n divides its length.
docs/00-introduction.md has the picture, under the all-reduce.
"""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x_N over the ranks of the group, as a new tensor."""
    raise NotImplementedError(
        "cut x into n chunks (torch.tensor_split), and decide which one rank r sends in round 0"
    )
