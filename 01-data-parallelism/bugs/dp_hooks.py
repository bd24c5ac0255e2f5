"""Gradients are summed while the backward pass still runs: a hook starts each parameter's all-reduce.

    hook of p:   p.grad is complete  ->  all-reduce of p.grad starts  ->  backward's end waits for all of them

With micro-batches p.grad is complete after the last of them. D inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Pending
from common.spot.run import Run

MESH = dict(dp=2)
BATCH, INPUTS, HIDDEN, MICRO_BATCHES = 12, 5, 12, 3


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("dp")
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1))
    optimizer = run.optimizer(model)
    complete, started = False, list[Pending]()

    def hook(p: Tensor) -> None:
        if complete:
            started.append(comm.all_reduce(p.grad, group, async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    draw = torch.Generator().manual_seed(1)
    for _ in range(run.steps):
        x_BD = torch.randn(BATCH, INPUTS, generator=draw)  # the same on every rank
        y_B = x_BD.square().sum(1)
        mine = slice(group.rank, BATCH, group.size)
        x_M, y_M = x_BD[mine].chunk(MICRO_BATCHES), y_B[mine].chunk(MICRO_BATCHES)

        optimizer.zero_grad()
        total = torch.zeros(())
        for i, (x_bD, y_b) in enumerate(zip(x_M, y_M, strict=True)):
            complete = i == MICRO_BATCHES - 1
            loss = F.mse_loss(model(x_bD).squeeze(1), y_b, reduction="sum") / BATCH
            loss.backward()
            total += loss.detach()
            while started:
                started.pop().wait()
        optimizer.step()
        comm.all_reduce(total, group)
        yield total
