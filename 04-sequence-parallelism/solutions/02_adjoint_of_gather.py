"""Adjoint of the gathered keys: each rank has a term of every key's gradient, so the adjoint is a reduce-scatter."""

from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group


class GatherKeys(torch.autograd.Function):
    """S(2) to R; the gradient is P, and comes back S(2)."""

    @staticmethod
    def forward(ctx: Any, x_BHsK: Tensor, sizes: list[int], group: Group) -> Tensor:
        """All-gather the tokens."""
        ctx.rest = sizes, group
        return comm.all_gather(x_BHsK, group, 2, sizes)

    @staticmethod
    def backward(ctx: Any, dx_BHSK: Tensor) -> tuple[Tensor, None, None]:
        """Sum the terms of all ranks and keep own tokens."""
        sizes, group = ctx.rest
        return comm.reduce_scatter(dx_BHSK, group, 2, sizes), None, None


def gather_keys(x_BHsK: Tensor, sizes: list[int], group: Group) -> Tensor:
    """Return the keys (or values) of all ranks, x_BHSK, in the order of the ranks; differentiable."""
    return GatherKeys.apply(x_BHsK, sizes, group)
