"""Megatron's MLP block: columns of A, rows of B, one all-reduce in each direction.

    y = x + g( gelu( f(norm(x)) A_f + a_f ) B_f ) + b        f: copy, gradients summed     g: sum, gradients copied

Each rank has f = F / n hidden features. T tokens, D features, F hidden features. Gradients are clipped by the norm
of the whole model, in which every parameter counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.placement import placement, shard
from common.spot.run import Run

MESH = dict(tp=2)
TOKENS, FEATURES, HIDDEN, BLOCKS = 10, 6, 8, 2
LARGEST_NORM = 1.0


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the ranks."""
    x = x.clone()
    comm.all_reduce(x, group)
    return x


class Copy(torch.autograd.Function):
    """f: the same x on all ranks, each of which uses it in its own columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return summed(gradients[0], ctx.group), None


class Reduce(torch.autograd.Function):
    """g: the sum of all ranks' parts; all ranks go on with the same result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Block(nn.Module):
    """The block above; monitor is the mean activation of all ranks' features, for a plot."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.norm, self.monitor = group, nn.LayerNorm(FEATURES), torch.zeros(())
        self.A_Df = shard(nn.Parameter(torch.randn(FEATURES, HIDDEN) / 3), group, 1)
        self.a_f = shard(nn.Parameter(torch.randn(HIDDEN) / 3), group, 0)
        self.B_fD = shard(nn.Parameter(torch.randn(HIDDEN, FEATURES) / 3), group, 0)
        self.b_D = nn.Parameter(torch.randn(FEATURES) / 3)

    def forward(self, x_TD: Tensor) -> Tensor:
        copied_TD = Copy.apply(self.norm(x_TD), self.group)
        h_Tf = copied_TD @ self.A_Df + self.a_f
        y_Tf = F.gelu(h_Tf)
        activation_Tf = h_Tf.detach().clone()
        comm.all_reduce(activation_Tf, self.group, "avg")
        self.monitor = activation_Tf.mean()
        return x_TD + Reduce.apply(y_Tf @ self.B_fD, self.group) + self.b_D


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("tp")
    model = nn.Sequential(*(Block(group) for _ in range(BLOCKS)))
    optimizer = run.optimizer(model)
    draw = torch.Generator().manual_seed(1)
    for _ in range(run.steps):
        x_TD = torch.randn(TOKENS, FEATURES, generator=draw)  # the same on every rank
        optimizer.zero_grad()
        loss = F.mse_loss(model(x_TD), x_TD.roll(1, 1))
        loss.backward()
        squares = {p: p.grad.square().sum() for p in model.parameters()}
        total = sum(s / (1 if placement(p) else group.size) for p, s in squares.items())
        norm = summed(torch.as_tensor(total), group).sqrt()
        for p in squares:
            p.grad = p.grad * (LARGEST_NORM / norm).clamp(max=1)
        optimizer.step()
        yield loss.detach()
