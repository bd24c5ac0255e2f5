"""1F1B: each stage runs a few forward passes ahead, then one forward and one backward pass in turn.

    stage 0   F0 F1 B0 F2 B1 F3 B2 B3          a stage holds at most p - r micro-batches
    stage 1   F0 B0 F1 B1 F2 B2 F3 B3

B samples, b of them in a micro-batch, W wide layers, M micro-batches, p stages, r this stage's number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Pending, sizes_of
from common.spot.run import Run

MESH = dict(pp=2)
BATCH, WIDTH, LAYERS, MICRO_BATCHES = 12, 6, 4, 4


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("pp")
    first, last = group.rank == 0, group.rank == group.size - 1
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]  # every rank draws the same, and keeps its own
    sizes = sizes_of(LAYERS, group.size)
    begin = sum(sizes[: group.rank])
    stage = nn.ModuleDict({str(i): layers[i] for i in range(begin, begin + sizes[group.rank])})
    optimizer = run.optimizer(stage)
    draw = torch.Generator().manual_seed(1)
    running: list[tuple[Tensor, Tensor]] = []  # input and output of micro-batches between the two passes
    sent: list[Pending] = []

    def forward(x_bW: Tensor, y_bW: Tensor) -> Tensor:
        if not first:
            x_bW = torch.empty_like(x_bW)
            comm.recv(x_bW, group, group.rank - 1)
            x_bW.requires_grad_()
        out_bW = x_bW
        for layer in stage.values():
            out_bW = out_bW + torch.tanh(layer(out_bW))
        error = torch.zeros(())
        if last:
            error = (out_bW - y_bW).square().sum()
            running.append((x_bW, error / (BATCH * WIDTH)))
        else:
            sent.append(comm.send(out_bW.detach(), group, group.rank + 1, async_op=True))
            running.append((x_bW, out_bW))
        return error.detach() / (BATCH * WIDTH)

    def backward() -> None:
        x_bW, out_bW = running.pop(0)
        gradient = torch.ones_like(out_bW)
        if not last:
            comm.recv(gradient, group, group.rank + 1)
        out_bW.backward(gradient)
        if not first:
            sent.append(comm.send(x_bW.grad, group, group.rank - 1, async_op=True))

    for _ in range(run.steps):
        x_BW = torch.randn(BATCH, WIDTH, generator=draw)  # the same on every rank
        micro = list(zip(x_BW.chunk(MICRO_BATCHES), x_BW.roll(1, 1).chunk(MICRO_BATCHES), strict=True))
        optimizer.zero_grad()
        ahead = min(MICRO_BATCHES, group.size - 1 - group.rank)
        total = sum((forward(*m) for m in micro[:ahead]), torch.zeros(()))
        for m in micro[ahead:]:
            total += forward(*m)
            backward()
        while running:
            backward()
        for pending in sent:
            pending.wait()
        sent.clear()
        optimizer.step()
        comm.all_reduce(total, group)
        yield total
