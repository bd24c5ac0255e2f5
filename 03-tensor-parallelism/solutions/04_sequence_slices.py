"""Between the regions a slice: all-gather to enter, reduce-scatter to leave, each the other's adjoint."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group


class Enter(torch.autograd.Function):
    """S(1) to R; the gradients are partial."""

    @staticmethod
    def forward(ctx: Any, x_BsD: Tensor, group: Group, length: int) -> Tensor:
        ctx.group, ctx.sizes = group, comm.sizes_of(length, group.size)
        return comm.all_gather(x_BsD, group, 1, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, dy_BSD: Tensor) -> tuple[Tensor, None, None]:
        return comm.reduce_scatter(dy_BSD, ctx.group, 1, ctx.sizes), None, None


class Leave(torch.autograd.Function):
    """P to S(1); the gradients are slices."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.sizes = group, comm.sizes_of(x_BSD.shape[1], group.size)
        return comm.reduce_scatter(x_BSD, group, 1, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, dy_BsD: Tensor) -> tuple[Tensor, None]:
        return comm.all_gather(dy_BsD, ctx.group, 1, ctx.sizes), None


def enter(x_BsD: Tensor, group: Group, length: int) -> Tensor:
    """Return x_BSD, the slices of all ranks."""
    return Enter.apply(x_BsD, group, length)


def leave(x_BSD: Tensor, group: Group) -> Tensor:
    """Return this rank's slice x_BsD of the sum over the ranks."""
    return Leave.apply(x_BSD, group)


class Block(nn.Module):
    """This rank's part of y = x + mlp(norm(x))."""

    def __init__(self, norm: nn.LayerNorm, up: nn.Linear, down: nn.Linear, group: Group) -> None:
        """norm and down.bias: whole, the same on all ranks. up: D to f, down: f to D, this rank's hidden features."""
        super().__init__()
        self.norm, self.up, self.down, self.group = norm, up, down, group

    def forward(self, x_BsD: Tensor, length: int) -> Tensor:
        """Return this rank's slice y_BsD. length: S."""
        hidden_BSf = F.gelu(self.up(enter(self.norm(x_BsD), self.group, length)))
        return x_BsD + self.down.bias + leave(F.linear(hidden_BSf, self.down.weight), self.group)

    def sum_gradients(self) -> None:
        """Sum the gradients that are terms of a sum over the ranks, in place."""
        for p in (*self.norm.parameters(), self.down.bias):
            comm.all_reduce(p.grad, self.group)
