"""Zigzag order: every rank has equal work under a causal mask.

Query i sees the keys 0 to i, so token i costs i + 1 query-key pairs. In contiguous order the last rank works longest:

    8 tokens, 2 ranks     rank 0: 0 1 2 3    1 + 2 + 3 + 4 = 10 pairs
                          rank 1: 4 5 6 7    5 + 6 + 7 + 8 = 26 pairs

Cut the sequence into 2n contiguous chunks instead, and give each rank two of them, one cheap and one expensive, so that
all ranks have the same work. A length that 2n does not divide is cut into chunks whose lengths differ by at most one
(torch.tensor_split does that), so that the tokens of two ranks differ by at most two.

Layers that treat each token alone do not need the order, but positions, targets and everything that is compared with
one device do: so a rank must know the positions of its tokens, and the ranks together must find the way back.

One call is allowed, in `whole`:

    comm.all_gather(x, group, dim, sizes)    pieces of all ranks joined along `dim` in the order of the ranks, on all
                                             ranks; `sizes` lists the length of each rank's piece along `dim`

`group.rank` and `group.size` are this rank's place and the number of ranks.

Targets, for 1 to 8 ranks and about 2000 tokens, which 2n divides or not: every position once, rising on each rank;
work of the slowest rank at most 1.01 times the mean; tokens of two ranks differ by at most two; at most two contiguous
runs per rank; the way back, with one all-gather.
"""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def positions(length: int, rank: int, size: int) -> Tensor:
    """Return the positions of the tokens of rank `rank` of `size` in a sequence of `length`: int64, rising."""
    raise NotImplementedError("cut torch.arange(length) into 2n chunks, and decide which two rank r gets")


def whole(x_sD: Tensor, length: int, group: Group) -> Tensor:
    """Return x_SD of all tokens, in the order of the sequence, on every rank; x_sD has the tokens of `positions`."""
    raise NotImplementedError("gather the ranks' tokens, and put each row at its position")
