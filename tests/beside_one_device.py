"""Train a lesson's version on all ranks and on one device, and check its bytes, without the tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.equality import OPTIMIZERS, Difference, Followed, compare, watch
from common.lesson.job import Job, one_device
from common.lesson.training import make_model, shape_of


def here() -> Runtime:
    """Return the runtime of one rank without a launcher."""
    return Runtime(0, 1, 0, 1, "none", torch.device("cpu"), "gloo", 60.0, Group.alone("world"))


def alone(rt: Runtime, o: Any, lesson: Lesson, name: str, optimizer: str) -> tuple[Followed, Job[Any]]:
    """Train the version's reference on one device."""
    whole, mesh = replace(o, micro_batches=1), Mesh(Group.alone())
    make, model = OPTIMIZERS[optimizer], make_model(o, rt.device)
    job = Job(rt, whole, name, model, mesh, lesson.axis, make, o.steps)
    return watch((lesson.one_device or one_device)(job), job), job


def on_ranks(rt: Runtime, o: Any, lesson: Lesson, name: str, optimizer: str) -> tuple[Followed, Job[Any]]:
    """Train the version on all ranks; check the bytes against the formula."""
    mesh = Mesh(rt.world, **{lesson.axis: rt.world_size})
    # replicas begin with different weights, to test their broadcast
    make, model = OPTIMIZERS[optimizer], make_model(replace(o, seed=o.seed + mesh.at["dp"]), rt.device)
    job = Job(rt, o, name, model, mesh, lesson.axis, make, o.steps)
    with Listener(rt.world) if name in lesson.unseen else Ledger() as ledger:
        found = watch(lesson.versions[name](job), job, mesh)
    counted = ledger.bytes() - ledger.bytes("bookkeeping")
    assert counted == lesson.bytes_of_run(name, shape_of(o), rt.world, o), name
    return found, job


def compared(rt: Runtime, o: Any, lesson: Lesson, name: str, optimizer: str) -> dict[str, Difference]:
    """Return the differences of the version from one device; check its bytes."""
    reference, _ = alone(rt, o, lesson, name, optimizer)
    return compare(reference, on_ranks(rt, o, lesson, name, optimizer)[0])
