"""ZeRO: each rank keeps a shard of every parameter, with its gradient and its optimizer state.

    backward pass      whole gradients   -> reduce-scatter -> the shard of their sum
    optimizer's step   shards of weights -> all-gather     -> whole weights

A shard is a run of the flattened parameter. A step whose largest gradient is a spike is left out on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group, sizes_of
from common.comm.placement import FlatShard, place
from common.spot.run import Run

MESH = dict(dp=2)
BATCH, INPUTS, HIDDEN, MICRO_BATCHES = 8, 5, 9, 2
LARGEST_NORM, SPIKE = 1.0, 7.7


def over_ranks(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Return the sum or the maximum of x over the ranks."""
    x = x.clone()
    comm.all_reduce(x, group, op)
    return x


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("dp")
    weights = {"a": torch.randn(INPUTS, HIDDEN) / 2, "b": torch.zeros(HIDDEN), "c": torch.randn(HIDDEN) / 2}
    sizes = {name: sizes_of(w.numel(), group.size) for name, w in weights.items()}
    shards = nn.ParameterDict()
    for name, w in weights.items():
        shards[name] = nn.Parameter(w.flatten().split(sizes[name])[group.rank].clone())
        place(shards[name], "dp", FlatShard(w.shape, tuple(sizes[name])))
        w.requires_grad_()
    optimizer = run.optimizer(shards)

    draw = torch.Generator().manual_seed(1)
    for _ in range(run.steps):
        x_BD = torch.randn(BATCH, INPUTS, generator=draw)  # the same on every rank
        mine_b = x_BD[group.rank :: group.size]
        optimizer.zero_grad()
        total = torch.zeros(())
        for x_bD in mine_b.chunk(MICRO_BATCHES):
            y_b = torch.tanh(x_bD @ weights["a"] + weights["b"]) @ weights["c"]
            loss = (y_b - x_bD.square().sum(1)).square().sum() / BATCH
            loss.backward()
            total += loss.detach()
            for name, w in weights.items():
                summed = comm.reduce_scatter(w.grad.flatten(), group, 0, sizes[name])
                w.grad = None
                before = shards[name].grad
                shards[name].grad = summed if before is None else before + summed

        flat = torch.cat([shard.grad for shard in shards.values()])
        largest = over_ranks(flat.abs().max(), group, "max")
        norm = over_ranks(flat.square().sum(), group).sqrt()
        for shard in shards.values():
            shard.grad = shard.grad * (LARGEST_NORM / norm).clamp(max=1)
        if largest < SPIKE:
            optimizer.step()
        with torch.no_grad():
            for name, w in weights.items():
                w.copy_(comm.all_gather(shards[name].detach(), group, 0, sizes[name]).view_as(w))
        yield over_ranks(total, group)
