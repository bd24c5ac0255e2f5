"""The gradient norm that counts every number once.

Clipping needs the 2-norm of the whole model's gradient, the same on every rank. Each rank holds some parameters whole
and of others a part, so the sum of squares over all ranks counts a replicated gradient once for each rank that has it.

    rank 0    a (whole)   b[0:3]        a is replicated: its squares would be counted twice
    rank 1    a (whole)   b[3:6]        b is split: together the ranks hold it once

Write `gradient_norm(gradients, shape, group)`:

    gradients    a list of (gradient, axes): the tensor of this rank, already synchronised, and the set of axes along
                 which its parameter is split. Along every other axis all ranks hold the same numbers. Ranks along pp
                 own different parameters, so for each of them "pp" is among the axes
    shape        ranks along each axis, {"pp": 2, "dp": 2, "ep": 1, "sp": 1, "tp": 1}
    group        all ranks of the mesh: `comm.all_reduce(x, group)` sums a tensor in place

Return the norm as a float. Ranks may hold different numbers of gradients.

Targets: the norm of one device on five meshes of 4 ranks; one all-reduce, of one float64.
"""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def gradient_norm(gradients: list[tuple[Tensor, set[str]]], shape: dict[str, int], group: Group) -> float:
    """Return the 2-norm of the whole model's gradient."""
    raise NotImplementedError(
        "find for one gradient how many ranks hold the same numbers; each gives its share of the squares"
    )
