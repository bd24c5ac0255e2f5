"""Zigzag order: rank r has chunks r and 2n-1-r of 2n, so that a cheap one goes with an expensive one."""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def positions(length: int, rank: int, size: int) -> Tensor:
    """Return the positions of the tokens of rank `rank` of `size` in a sequence of `length`: int64, rising."""
    chunks = torch.arange(length).tensor_split(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def whole(x_sD: Tensor, length: int, group: Group) -> Tensor:
    """Return x_SD of all tokens, in the order of the sequence, on every rank; x_sD has the tokens of `positions`."""
    every = [positions(length, rank, group.size) for rank in range(group.size)]
    gathered_SD = comm.all_gather(x_sD, group, 0, [len(p) for p in every])
    return gathered_SD[torch.cat(every).argsort()]
