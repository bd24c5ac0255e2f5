"""A run that ends, and goes on from its checkpoint: weights, the optimizer's state and the position in the data.

    every tp rank has other rows and columns: a file for each        replicas along dp have the same: one writes

After RESUME steps all ranks throw away what they have and read the files. Dropout masks are a function of the step
and of the sample, so that they do not depend on the mesh. B samples, b of them here, D features, F hidden.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives
from common.comm.placement import shard
from common.spot.run import Run

MESH = dict(dp=2, tp=2)
DATA, BATCH, FEATURES, HIDDEN, RESUME = 32, 8, 6, 8, 3


def new_model(tp: Group) -> nn.ParameterDict:
    """Return freshly drawn weights, this rank's rows and columns."""
    draw = torch.Generator().manual_seed(0)
    a_DF = nn.Parameter(torch.randn(FEATURES, HIDDEN, generator=draw) / 3)
    b_FD = nn.Parameter(torch.randn(HIDDEN, FEATURES, generator=draw) / 3)
    return nn.ParameterDict({"a": shard(a_DF, tp, 1), "b": shard(b_FD, tp, 0)})


def dropout(x_bD: Tensor, step: int, samples_b: Tensor) -> Tensor:
    """Drop a fifth of the features, others in each step and sample; replicated along tp."""
    seeds = [1000 * step + int(sample) for sample in samples_b]
    kept = torch.stack(
        [torch.rand(FEATURES, generator=torch.Generator().manual_seed(s)) > 0.2 for s in seeds]
    )
    return x_bD * kept / 0.8


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    dp, tp, world = run.mesh.group("dp"), run.mesh.group("tp"), run.mesh.world
    model = new_model(tp)
    optimizer = run.optimizer(model)
    data_SD = torch.randn(DATA, FEATURES, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as own:
        folder = comm.everyones(own, world)[0]  # rank 0's, on a file system that all ranks see
        file = os.path.join(folder, f"tp-{tp.rank}.pt")
        step = position = 0
        while step < run.steps:
            samples_b = (torch.arange(position, position + BATCH) % DATA).chunk(dp.size)[dp.rank]
            x_bD = data_SD[samples_b]
            optimizer.zero_grad()
            h_bf = torch.tanh(collectives.copy(dropout(x_bD, step, samples_b), tp) @ model["a"])
            y_bD = collectives.reduce(h_bf @ model["b"], tp)
            loss = F.mse_loss(y_bD, x_bD.roll(1, 1), reduction="sum") / (BATCH * FEATURES)
            loss.backward()
            for p in model.parameters():
                comm.all_reduce(p.grad, dp)
            optimizer.step()
            total = loss.detach()
            comm.all_reduce(total, dp)
            yield total
            step, position = step + 1, position + BATCH

            if step == RESUME:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if dp.rank == 0:
                    torch.save(state | {"step": step, "position": position}, f"{file}.{world.rank}")
                    os.replace(f"{file}.{world.rank}", file)
                comm.barrier(world)  # the files are complete
                saved = torch.load(file, weights_only=True)
                model = new_model(tp)
                optimizer = run.optimizer(model)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                step, position = saved["step"], saved["position"]
        comm.barrier(world)  # rank 0's folder ends here
