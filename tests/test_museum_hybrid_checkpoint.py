"""Museum of silent bugs, checkpoints: each is written and read without an error, but weights are lost.

Training stops after a step and resumes from the checkpoint, on two ranks that hold a shard each. The broken
versions take the shards for replicas. They are caught in the next step by equality with one device in every
gradient and weight; `pytest -s tests/test_museum_hybrid_checkpoint.py` prints the numbers.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from museum import Found, tour
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import sum_gradients
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Difference, Followed, compare, watch
from common.lesson.job import Job, one_device, total
from common.lesson.training import TrainingOptions, make_model
from common.models.configs import CONFIGS, llama

import hybrid_checkpoint
from hybrid_checkpoint import Checkpoints, SaveFailed, entries_of
from tp_megatron import tensor_parallel

CONFIGS["museum-checkpoint"] = llama(layers=2, width=16, heads=2, kv_heads=2, mlp_width=12, sequence=8)
OPTIONS = TrainingOptions(model="museum-checkpoint", batch=3, sequence=8, steps=2, micro_batches=1)
Exhibit = Callable[[nn.Module, Mesh, Path], None]  # saves the model and spoils it, then restores it


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)


def a_file_of_each_replica(model: nn.Module, mesh: Mesh, folder: Path) -> None:
    """Broken: names files by the rank along dp alone: of two shards along tp the last one written stays."""
    file = folder / f"rank-{mesh.at['dp']}.pt"
    for rank in range(mesh.world.size):
        if mesh.world.rank == rank:
            torch.save(model.state_dict(), file)
        comm.barrier(mesh.world)
    spoil(model)
    model.load_state_dict(torch.load(file, weights_only=True))


def rank_0_writes(model: nn.Module, mesh: Mesh, folder: Path) -> None:
    """Broken: rank 0 writes for all, which is right for replicas only."""
    if mesh.world.rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    comm.barrier(mesh.world)
    spoil(model)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))


def the_library_told_nothing(model: nn.Module, mesh: Mesh, folder: Path) -> None:
    """Broken: the library takes tensors of one name for replicas, and keeps that of the least busy rank."""
    state = model.state_dict()
    dcp.save(state, checkpoint_id=folder, process_group=mesh.world.pg)
    spoil(model)
    dcp.load(state, checkpoint_id=folder, process_group=mesh.world.pg)


def boxes(model: nn.Module, mesh: Mesh, folder: Path) -> None:
    """Right: save each rank's box of the whole tensor, but of replicas only one, then restore."""
    checkpoints = Checkpoints(folder, mesh)
    checkpoints.save(1, entries_of(model), {})
    spoil(model)
    checkpoints.restore(entries_of(model))


EXHIBITS: dict[str, Exhibit] = {
    "a file of each replica": a_file_of_each_replica,
    "rank 0 writes": rank_0_writes,
    "the library, told nothing": the_library_told_nothing,
    "right": boxes,
}


def train(job: Job[TrainingOptions], folder: Path) -> Iterator[Tensor]:
    """Train over tp; before the second step, save, overwrite and restore the model as the exhibit does."""
    model = job.model
    tensor_parallel(model, job.group)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        if batch.step == 1:
            EXHIBITS[job.version](model, job.mesh, folder)
        count = batch.count_targets()
        optimizer.zero_grad()
        (tokens_BS, targets_BS), *_ = batch
        loss_sum, _ = model.loss(model(tokens_BS), targets_BS)
        (loss_sum / count).backward()
        sum_gradients(model.parameters(), job.mesh)
        optimizer.step()
        yield total([loss_sum.detach()]) / count


@functools.cache
def alone(rt: Runtime, optimizer: str) -> Followed:
    """Return the run on one device, the same for all exhibits."""
    o, make = OPTIONS, OPTIMIZERS[optimizer]
    job = Job(rt, o, "right", make_model(o, rt.device), Mesh(Group.alone()), "tp", make, o.steps)
    return watch(one_device(job), job)


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    o, make = OPTIONS, OPTIMIZERS[optimizer]
    mesh = Mesh(rt.world, tp=rt.world_size)
    job = Job(rt, o, name, make_model(o, rt.device), mesh, "tp", make, o.steps)
    folder = Path(comm.everyones(tempfile.mkdtemp(), rt.world)[0])
    followed = watch(train(job, folder), job, mesh)
    comm.barrier(rt.world)
    if rt.rank == 0:
        shutil.rmtree(folder)
    return compare(alone(rt, optimizer), followed)


def caught(name: str, found: Found) -> None:
    assert all(differences["gradients"].value > 1e-3 for differences in found.values())
    assert found["sgd"]["weights"].value > 1e-5


visited, test_exhibit = tour(visit, EXHIBITS, caught)


def every_replica_writes(rt: Runtime, folder: Path) -> str:
    """Return the error if both ranks write the same box."""
    mesh, model = Mesh(rt.world, dp=2), nn.Linear(3, 2)
    with patch.object(hybrid_checkpoint, "writes", lambda *_: True), pytest.raises(SaveFailed) as error:
        Checkpoints(folder, mesh).save(1, entries_of(model), {})
    return str(error.value)


def test_a_box_from_two_ranks_is_refused(tmp_path: Path) -> None:
    """Equal boxes from two ranks are refused, not merged: the two ranks may hold different numbers."""
    for message in spawn(every_replica_writes, 2, tmp_path):
        assert "key:weight has overlapping chunks" in message
