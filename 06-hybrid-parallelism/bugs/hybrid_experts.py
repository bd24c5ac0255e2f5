"""Experts on ep, replicas on dp: which gradients are summed over which ranks, and the norm of the whole model.

    dense parameter    replicated on dp and ep, which both split the tokens    gradient: sum over dp and ep
    experts            split on ep, replicated on dp                           gradient: sum over dp

To be short, an expert sees the tokens of all ranks along ep, and a mask keeps those that chose it.
T tokens, t of them on this rank, g on the ranks along ep together, E experts, e = E / ep here, D features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import collectives
from common.comm.placement import placement, shard
from common.spot.run import Run

MESH = dict(dp=2, ep=2)
TOKENS, EXPERTS, FEATURES = 16, 4, 6
LARGEST_NORM = 0.2


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    replicas, holders = run.mesh.group("dp"), run.mesh.group("ep")
    all_tokens = run.mesh.group("dp", "ep")  # the ranks that have tokens of their own
    model = nn.ModuleDict({"norm": nn.LayerNorm(FEATURES), "router": nn.Linear(FEATURES, EXPERTS)})
    whole_EDD = nn.Parameter(torch.randn(EXPERTS, FEATURES, FEATURES) / 2)
    experts_eDD = shard(whole_EDD, holders, 0)
    model["experts"] = nn.ParameterDict({"w": experts_eDD})
    optimizer = run.optimizer(model)
    draw = torch.Generator().manual_seed(1)
    e = len(experts_eDD)
    for _ in range(run.steps):
        x_TD = torch.randn(TOKENS, FEATURES, generator=draw)  # the same on every rank
        x_tD, y_tD = (x.chunk(all_tokens.size)[all_tokens.rank] for x in (x_TD, x_TD.roll(1, 1).tanh()))
        optimizer.zero_grad()
        z_tD = model["norm"](x_tD)
        weight_t, chosen_t = model["router"](z_tD).softmax(1).max(1)
        z_gD = collectives.gather(z_tD, holders, 0, gradient="partial")
        chosen_g = comm.all_gather(chosen_t, holders)
        mask_eg = chosen_g == torch.arange(e)[:, None] + holders.rank * e
        out_gD = (torch.tanh(z_gD @ experts_eDD) * mask_eg[:, :, None]).sum(0)
        out_tD = collectives.reduce_scatter(out_gD, holders, 0) * weight_t[:, None]
        loss = F.mse_loss(x_tD + out_tD, y_tD, reduction="sum") / x_TD.numel()
        loss.backward()

        total, squares = loss.detach(), torch.zeros(())
        for p in model.parameters():
            split = "ep" in placement(p)
            comm.all_reduce(p.grad, replicas if split else all_tokens)
            squares += p.grad.square().sum() / (1 if split else holders.size)
        comm.all_reduce(squares, holders)
        for p in model.parameters():
            p.grad *= (LARGEST_NORM / squares.sqrt()).clamp(max=1)
        optimizer.step()
        comm.all_reduce(total, all_tokens)
        yield total
