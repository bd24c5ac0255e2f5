"""f: a copy whose gradients are summed. g: a sum whose gradient is passed on."""

from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the ranks, as a new tensor."""
    total = x.clone()
    comm.all_reduce(total, group)
    return total


class F(torch.autograd.Function):
    """R to R; the gradients are partial."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return summed(dy, ctx.group), None


class G(torch.autograd.Function):
    """P to R; the gradient is replicated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def f(x: Tensor, group: Group) -> Tensor:
    """Return x, the same on all ranks; in the backward pass, sum the gradients over the ranks."""
    return F.apply(x, group)


def g(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the ranks as a new tensor; in the backward pass, pass the gradient on."""
    return G.apply(x, group)
