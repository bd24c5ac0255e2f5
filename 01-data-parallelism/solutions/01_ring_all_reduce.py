"""Ring all-reduce: in round t rank r passes chunk r - t on and adds to chunk r - t - 1; then chunks go around."""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x_N over the ranks of the group, as a new tensor."""
    n, r = group.size, group.rank
    total = x.clone()
    chunks = total.tensor_split(n)
    right, left = (r + 1) % n, (r - 1) % n
    for t in range(n - 1):
        received = torch.empty_like(chunks[(r - t - 1) % n])
        comm.exchange(chunks[(r - t) % n], received, group, right, left)
        chunks[(r - t - 1) % n].add_(received)
    for t in range(n - 1):
        received = torch.empty_like(chunks[(r - t) % n])
        comm.exchange(chunks[(r + 1 - t) % n], received, group, right, left)
        chunks[(r - t) % n].copy_(received)
    return total
