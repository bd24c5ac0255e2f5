"""A mixture-of-experts layer: each rank has some of the experts, and tokens travel to the experts they chose.

    router -> sort by expert -> all-to-all -> experts -> all-to-all -> weighted sum of each token's K results

As in data parallelism each rank's loss is the mean over its own tokens, equally many on all ranks, and gradients of
the dense parameters are averaged. T tokens, t = T / n of them here, E experts, e = E / n, K choices, D features.
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

MESH = dict(ep=2)
TOKENS, EXPERTS, CHOICES, FEATURES, HIDDEN = 16, 4, 2, 6, 5
BALANCE = 0.1


class Layer(nn.Module):
    """The layer above; the balance loss is that of all ranks' tokens."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.router = group, nn.Linear(FEATURES, EXPERTS, bias=False)
        self.up_eDF = shard(nn.Parameter(torch.randn(EXPERTS, FEATURES, HIDDEN) / 2), group, 0)
        self.down_eFD = shard(nn.Parameter(torch.randn(EXPERTS, HIDDEN, FEATURES) / 2), group, 0)

    def forward(self, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        n, e = self.group.size, len(self.up_eDF)
        p_tE = self.router(x_tD).softmax(1)
        weight_tK, chosen_tK = p_tE.topk(CHOICES)
        order = chosen_tK.flatten().argsort(stable=True)  # of the t K choices, by expert
        to_expert_E = torch.bincount(chosen_tK.flatten(), minlength=EXPERTS)
        from_rank_ne = comm.all_to_all(to_expert_E, self.group).view(n, e)
        send, receive = to_expert_E.view(n, e).sum(1).tolist(), from_rank_ne.sum(1).tolist()

        rows = collectives.all_to_all(x_tD[order // CHOICES], self.group, send, receive)
        expert_of_row = torch.arange(e).repeat(n).repeat_interleave(from_rank_ne.flatten())
        results = torch.zeros_like(rows)
        for j in range(e):
            mine = expert_of_row == j
            results[mine] = F.gelu(rows[mine] @ self.up_eDF[j]) @ self.down_eFD[j]
        results = collectives.all_to_all(results, self.group, receive, send)
        weighted = results * weight_tK.flatten()[order, None]
        y_tD = torch.zeros_like(x_tD).index_add(0, order // CHOICES, weighted)

        share_E = to_expert_E / (len(x_tD) * CHOICES)
        comm.all_reduce(share_E, self.group, "avg")
        return y_tD, EXPERTS * (share_E * p_tE.mean(0)).sum()


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("ep")
    layer = Layer(group)
    optimizer = run.optimizer(layer)
    draw = torch.Generator().manual_seed(1)
    for _ in range(run.steps):
        x_TD = torch.randn(TOKENS, FEATURES, generator=draw)  # the same on every rank
        x_tD, y_tD = (x.chunk(group.size)[group.rank] for x in (x_TD, x_TD.roll(1, 1).tanh()))
        optimizer.zero_grad()
        out_tD, balance = layer(x_tD)
        loss = F.mse_loss(x_tD + out_tD, y_tD) + BALANCE * balance
        loss.backward()
        for p in layer.parameters():
            if "ep" in placement(p):
                p.grad /= group.size
            else:
                comm.all_reduce(p.grad, group, "avg")
        optimizer.step()
        total = loss.detach()
        comm.all_reduce(total, group, "avg")
        yield total
