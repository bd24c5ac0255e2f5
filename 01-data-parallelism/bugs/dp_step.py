"""A data-parallel step with micro-batches: each rank trains on its samples of every batch, gradients are summed.

    loss = sum over the samples of all ranks / number of samples of all ranks

B samples of a batch, b of them on this rank, S samples in the data set, D inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import sizes_of
from common.spot.run import Run

MESH = dict(dp=2)
SAMPLES, BATCH, INPUTS, HIDDEN, MICRO_BATCHES = 28, 7, 6, 16, 2
LARGEST_NORM = 1.0


def data() -> tuple[Tensor, Tensor]:
    """Return the data set: x_SD and y_S, a smooth function of x."""
    x_SD = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(1))
    return x_SD, torch.sin(x_SD.sum(1)) + x_SD[:, 0]


def decay(optimizer: torch.optim.Optimizer) -> None:
    """Lower the learning rate by a tenth, once per step."""
    for settings in optimizer.param_groups:
        settings["lr"] *= 0.9


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("dp")
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    optimizer = run.optimizer(model)
    x_SD, y_S = data()
    order_S = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2))

    for t in range(run.steps):
        batch_B = order_S[torch.arange(t * BATCH, (t + 1) * BATCH) % SAMPLES]
        mine_b = batch_B.split(sizes_of(BATCH, group.size))[group.rank]
        optimizer.zero_grad()
        total = torch.zeros(())
        for micro in mine_b.tensor_split(MICRO_BATCHES):
            error = F.mse_loss(model(x_SD[micro]).squeeze(1), y_S[micro], reduction="sum")
            loss = error / BATCH
            loss.backward()
            total += error.detach() / BATCH
        decay(optimizer)

        gradients = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in gradients])
        comm.all_reduce(flat, group)
        norm = flat.norm()
        flat *= (LARGEST_NORM / norm).clamp(max=1)
        for g, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            g.copy_(summed.view_as(g))
        optimizer.step()
        comm.all_reduce(total, group)
        yield total
