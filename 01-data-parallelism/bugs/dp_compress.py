"""Compressed gradients with error feedback: a worker sends the largest numbers, and remembers the rest.

    wanted = gradient + memory        sent = the K largest of wanted        memory = wanted - sent

After the first step parameters are sent in the order in which the backward pass finishes them: last layer first. Two
workers, one per rank; one device plays both. D features, both layers are D x D.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common import comm
from common.spot.run import Run

MESH = dict(dp=2)
WORKERS, BATCH, FEATURES, SENT = 2, 8, 5, 6


def largest_part(x: Tensor) -> Tensor:
    """Return x with all but its SENT largest numbers set to zero."""
    kept = x.abs().flatten().topk(SENT).indices
    return torch.zeros_like(x).flatten().index_copy(0, kept, x.flatten()[kept]).view_as(x)


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("dp")
    workers = range(group.rank, WORKERS, group.size)
    model = nn.ParameterDict({name: torch.randn(FEATURES, FEATURES) / 2 for name in ("first", "second")})
    optimizer = run.optimizer(model)
    memory: dict[object, Tensor] = {}
    draw = torch.Generator().manual_seed(1)
    for t in range(run.steps):
        x_BD = torch.randn(BATCH, FEATURES, generator=draw)  # the same on every rank
        order = ("first", "second") if t == 0 else ("second", "first")
        sums = [torch.zeros(FEATURES, FEATURES) for _ in order]
        total = torch.zeros(())
        for worker in workers:
            x_bD = x_BD[worker::WORKERS]
            optimizer.zero_grad()
            y_bD = torch.tanh(x_bD @ model["first"]) @ model["second"]
            loss = (y_bD - x_bD.roll(1, 1)).square().sum() / BATCH
            loss.backward()
            total += loss.detach()
            for place, name in enumerate(order):
                gradient = model[name].grad
                key = (worker, name)
                wanted = gradient + memory.get(key, torch.zeros_like(gradient))
                sent = largest_part(wanted)
                memory[key] = wanted - sent
                sums[place] += sent
        for place, name in enumerate(order):
            comm.all_reduce(sums[place], group)
            model[name].grad = sums[place]
        optimizer.step()
        comm.all_reduce(total, group)
        yield total
