"""Options of the lessons of chapter 01, and runs of their training loops on all ranks and on one device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

import torch
from torch import Tensor

from common.comm import Group
from common.comm.checked.asked import if_asked
from common.comm.ledger import Ledger
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.lesson.comparison import check as check
from common.lesson.equality import OPTIMIZERS, Followed, Start, unmoved, watch
from common.lesson.job import Job, Train
from common.lesson.training import Batches, TrainingOptions, make_model


@dataclass
class DataParallelOptions(TrainingOptions):
    """Options of the lessons of chapter 01: model, batch and buckets."""

    bucket_mb: Annotated[float, Within(1e-6, 1e6)] = 0.1
    """Size of a bucket in MiB."""
    versions: tuple[str, ...] = ("naive", "bucketed", "ddp")
    """Versions to run."""


def on_ranks(
    rt: Runtime,
    o: DataParallelOptions,
    train: Train,
    name: str,
    optimizer: str,
    unseen: Collection[str] = (),
    replicas: bool = False,
) -> tuple[Followed, Job[Any], Fraction]:
    """Train version `name` on all ranks; return (its results, its job, the bytes this rank sent).

    unseen: versions whose messages the ledger does not see. replicas: the ranks' weights differ, so the results
    are those of this rank alone.
    """
    mesh = Mesh(rt.world, dp=rt.world_size)
    model = make_model(replace(o, seed=o.seed + rt.rank), rt.device)  # the broadcast must mend this
    job = Job(rt, o, name, model, mesh, "dp", OPTIMIZERS[optimizer], o.steps)
    seen = name not in unseen
    with Ledger() if seen else Listener(rt.world) as ledger, if_asked(mesh if replicas and seen else None):
        followed = watch(train(job), job, None if replicas else mesh, seen)
    return followed, job, ledger.bytes() - ledger.bytes("bookkeeping")


def on_one_device(
    rt: Runtime,
    o: DataParallelOptions,
    train: Train,
    name: str,
    optimizer: str,
    start: Start = unmoved,
    make_batches: Callable[..., Batches] = Batches,
) -> Followed:
    """Train version `name` on one device, from the model that `start` returns; return its results."""
    model = start(make_model(o, rt.device))
    job = Job(rt, o, name, model, Mesh(Group.alone()), "dp", OPTIMIZERS[optimizer], o.steps)
    job.make_batches = make_batches
    return watch(train(job), job)


def batches_of_ranks(o: DataParallelOptions, ranks: int, device: torch.device) -> list[Batches]:
    """Return the batches of each of so many ranks, all on this device."""
    return [Batches(o, Group("part", r, ranks, tuple(range(ranks))), device) for r in range(ranks)]


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Return one flat tensor with a copy of all numbers."""
    return torch.cat([t.detach().flatten() for t in tensors])
