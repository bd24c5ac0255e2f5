"""Megatron's sequence parallelism: between the matrices each rank has a slice of the tokens.

    y_t = x_t + scatter-sum( gelu( gather(norm(x_t)) A_f ) B_f )

gather joins the slices of all ranks, scatter-sum adds the ranks' parts and keeps this rank's slice. The norm is
replicated, but a rank applies it to its own tokens. T tokens, t = T / n of them here, D features, F hidden, f = F / n.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives
from common.comm.placement import placement, shard
from common.spot.run import Run

MESH = dict(tp=2)
TOKENS, FEATURES, HIDDEN, BLOCKS = 8, 6, 8, 2


class Block(nn.Module):
    """The block above."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.norm = group, nn.LayerNorm(FEATURES)
        self.A_Df = shard(nn.Parameter(torch.randn(FEATURES, HIDDEN) / 3), group, 1)
        self.B_fD = shard(nn.Parameter(torch.randn(HIDDEN, FEATURES) / 3), group, 0)

    def forward(self, x_tD: Tensor) -> Tensor:
        x_TD = collectives.gather(self.norm(x_tD), self.group, 0, gradient="partial")
        y_TD = F.gelu(x_TD @ self.A_Df) @ self.B_fD
        return x_tD + collectives.reduce_scatter(y_TD, self.group, 0)


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("tp")
    model = nn.Sequential(*(Block(group) for _ in range(BLOCKS)))
    optimizer = run.optimizer(model)
    draw = torch.Generator().manual_seed(1)
    for _ in range(run.steps):
        x_TD = torch.randn(TOKENS, FEATURES, generator=draw)  # the same on every rank
        x_tD, y_tD = (x.chunk(group.size)[group.rank] for x in (x_TD, x_TD.roll(1, 1)))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x_tD), y_tD, reduction="sum") / x_TD.numel()
        loss.backward()
        for p in model.parameters():
            if "tp" not in placement(p):
                comm.all_reduce(p.grad, group)
        optimizer.step()
        total = loss.detach()
        comm.all_reduce(total, group)
        yield total
