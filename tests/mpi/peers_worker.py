"""Run torch's parallelism on our process groups against one device: float64, after two steps of AdamW.

python peers_worker.py RESULT 2 3+1, under mpirun: on 2 ranks of one host; on hosts of 3 ranks and of 1
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from mpi.worker import WORLD, on_first_ranks, write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from common.launch.mpi_backend import register

N, RANK = WORLD.size, WORLD.rank  # N is less where the first ranks alone are the world
STEPS, BATCH, WIDTH = 2, 8, 12


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        *(
            layer
            for _ in range(N)
            for layer in (nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        )
    ).double()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def mine(x: Tensor) -> Tensor:
    return x.chunk(N)[RANK]


def one_device() -> dict[str, Tensor]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def train(model: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def on_my_part(model: nn.Module, step: int) -> Tensor:
    x, y = data(step)
    return F.mse_loss(model(mine(x)), mine(y))


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight; sharded ones are gathered."""
    state = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in state.items()}


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest relative difference of two sets of weights on this rank."""
    assert a.keys() >= b.keys()
    assert b
    return max(((a[name] - b[name]).abs().max() / a[name].abs().max()).item() for name in b)


def ddp() -> dict[str, Tensor]:
    model = DistributedDataParallel(make(), bucket_cap_mb=0.002)
    train(model, on_my_part)
    return whole(model)


def sharded() -> nn.Module:
    model = make()
    mesh = init_device_mesh("cpu", (N,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, on_my_part)
    return model


def fsdp() -> dict[str, Tensor]:
    return whole(sharded())


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """Save the shards of all ranks, read them back into another model, and return its weights."""
    trained = sharded()
    dcp.save({"model": trained.state_dict()}, checkpoint_id=folder)
    torch.manual_seed(9)
    other = sharded()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    return whole(other)


def tensor_parallel() -> dict[str, Tensor]:
    model = make()
    plan = {
        name: ColwiseParallel() if int(name) % 3 == 0 else RowwiseParallel()
        for name, m in model.named_children()
        if isinstance(m, nn.Linear)
    }
    parallelize_module(model, init_device_mesh("cpu", (N,)), plan)

    def on_the_whole(model: nn.Module, step: int) -> Tensor:
        x, y = data(step)
        return F.mse_loss(model(x), y)

    train(model, on_the_whole)
    return whole(model)


def pipeline() -> dict[str, Tensor]:
    """Train a pipeline with one block per stage and four micro-batches; return this rank's weights."""
    part = make()[3 * RANK : 3 * RANK + 3]
    stage = PipelineStage(part, RANK, N, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        schedule.step(*([x] if RANK == 0 else []), **({"target": y} if RANK == N - 1 else {}))
        optimizer.step()
    return whole(part)  # a slice of a Sequential keeps the names


def two_axes() -> dict[str, Tensor]:
    """Train with tensor parallelism in pairs and FSDP2 across them: overlapping groups."""
    model = make()
    mesh = init_device_mesh("cpu", (N // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        name: ColwiseParallel() if int(name) % 3 == 0 else RowwiseParallel()
        for name, m in model.named_children()
        if isinstance(m, nn.Linear)
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])

    def on_my_rows(model: nn.Module, step: int) -> Tensor:
        x, y = (t.chunk(N // 2)[RANK // 2] for t in data(step))
        return F.mse_loss(model(x), y)

    train(model, on_my_rows)
    return whole(model)


def differences(hosts: str, folder: Path) -> dict[str, float]:
    """Return each strategy's largest difference from one device, on a world of its own."""
    global N
    sizes = [int(ranks) for ranks in hosts.split("+")]
    N = sum(sizes)
    os.environ["FIVED_RANKS_PER_HOST"] = str(sizes[0])
    store = dist.FileStore(str(folder / "store"), N)
    dist.init_process_group("fived", store=store, rank=RANK, world_size=N, timeout=timedelta(seconds=60))
    reference = one_device()
    runs: dict[str, Callable[[], dict[str, Tensor]]] = {
        "DDP": ddp, "FSDP2": fsdp, "DTensor": tensor_parallel, "pipelining": pipeline, "FSDP2 x DTensor": two_axes,
        "checkpoint": lambda: checkpoint(folder / "checkpoint"),
    }  # fmt: skip
    found = {name: largest(reference, run()) for name, run in runs.items()}
    dist.destroy_process_group()
    return found


def main(_: str, *settings: str) -> None:
    register()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for hosts in settings:
        ranks = sum(int(n) for n in hosts.split("+"))
        folder = Path(WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else None))
        (found[hosts],) = on_first_ranks(
            [ranks], lambda _, where=(hosts, folder): differences(*where)
        ).values()
    write(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
