"""GPipe on two stages and two replicas, with an embedding that is also the head, and gradients clipped.

    stage 0   table -> layer 0      stage 1   layer 1 -> table      the two tables are one parameter

All forward passes, then all backward passes. Replicas sum their gradients in the last backward pass.
B samples, b of them in a micro-batch of this replica, V words, W wide, M micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm.placement import tie
from common.spot.run import Run

MESH = dict(pp=2, dp=2)
BATCH, WORDS, WIDTH, MICRO_BATCHES = 16, 7, 6, 4
LARGEST_NORM = 0.2


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    stages, replicas = run.mesh.group("pp"), run.mesh.group("dp")
    first, last = stages.rank == 0, stages.rank == stages.size - 1
    table = nn.Embedding(WORDS, WIDTH)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    tie(table.weight, stages)
    mine = layers if stages.size == 1 else layers[stages.rank :][:1]
    stage = nn.ModuleDict({str(layers.index(layer)): layer for layer in mine} | {"table": table})
    optimizer = run.optimizer(stage)
    draw = torch.Generator().manual_seed(1)

    for _ in range(run.steps):
        words_B = torch.randint(WORDS, (BATCH,), generator=draw)  # the same on every rank
        next_B = (2 * words_B + 1) % WORDS
        samples = slice(replicas.rank, BATCH, replicas.size)
        words_M, next_M = words_B[samples].chunk(MICRO_BATCHES), next_B[samples].chunk(MICRO_BATCHES)
        optimizer.zero_grad()
        total, running = torch.zeros(()), []
        for words_b, next_b in zip(words_M, next_M, strict=True):
            if first:
                x_bW = table(words_b)
            else:
                x_bW = torch.empty(len(words_b), WIDTH)
                comm.recv(x_bW, stages, stages.rank - 1)
                x_bW.requires_grad_()
            out = x_bW
            for layer in mine:
                out = out + torch.tanh(layer(out))
            if last:
                out = F.cross_entropy(out @ table.weight.T, next_b, reduction="sum") / BATCH
                total += out.detach()
            else:
                comm.send(out.detach(), stages, stages.rank + 1)
            running.append((x_bW, out))

        for i, (x_bW, out) in enumerate(running):
            gradient = torch.ones_like(out)
            if not last:
                comm.recv(gradient, stages, stages.rank + 1)
            out.backward(gradient)
            if not first:
                comm.send(x_bW.grad, stages, stages.rank - 1)
            if i == MICRO_BATCHES - 1:
                for p in stage.parameters():
                    comm.all_reduce(p.grad, replicas)
        comm.all_reduce(table.weight.grad, stages)

        squares = sum(p.grad.square().sum() for layer in mine for p in layer.parameters())
        comm.all_reduce(squares, stages)
        norm = math.sqrt(squares + table.weight.grad.square().sum())
        for p in stage.parameters():
            p.grad *= min(1.0, LARGEST_NORM / norm)
        optimizer.step()
        comm.all_reduce(total, stages)
        comm.all_reduce(total, replicas)
        yield total
