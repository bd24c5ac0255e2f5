"""Train a lesson's version on all ranks and on one device, and compare; without the tables.

CASES = {"naive, gpt2": Case("naive", DataParallelOptions(model="gpt2-tiny"))}
equal_to_one_device(4, lesson_of, CASES)           # of a lesson; checks its bytes, too
assert_equal(4, train, CASES, references)          # of any training on ranks
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
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
        found = watch(lesson.versions[name](job), job, None if name in lesson.on_rank_0 else mesh)
    counted = ledger.bytes() - ledger.bytes("bookkeeping")
    assert counted == lesson.bytes_of_run(name, shape_of(o), rt.world, o), name
    return found, job


@dataclass(frozen=True)
class Case:
    """A version of a lesson, and the options to train it with."""

    version: str
    options: Any


LessonOf = Callable[[Case], Lesson]
Key = tuple[str, str]  # name of a case, optimizer


def _differences(
    rt: Runtime,
    train: Callable[[Runtime, Any, str], Followed],
    cases: Mapping[str, Any],
    references: Mapping[Key, Followed],
) -> dict[Key, dict[str, Difference]]:
    return {
        (name, optimizer): compare(reference, train(rt, cases[name], optimizer))
        for (name, optimizer), reference in references.items()
    }


def assert_equal(
    world: int,
    train: Callable[[Runtime, Any, str], Followed],
    cases: Mapping[str, Any],
    references: Mapping[Key, Followed],
) -> None:
    """Assert that `train(rt, case, optimizer)` on `world` ranks equals each reference to 1e-12, on every rank.

    Cases and references come from the parent process, so that ranks share them and --seed holds for both.
    """
    for of_rank in spawn(_differences, world, train, cases, references):
        for key, found in of_rank.items():
            assert max(d.value for d in found.values()) <= 1e-12, (world, key, found)


_references: dict[str, Followed] = {}


def reference(case: Case, lesson: Lesson, optimizer: str) -> Followed:
    """Return the case's training on one device, once for all world sizes and versions that share it."""
    version = case.version if lesson.one_device else "plain"
    key = f"{version} {optimizer} {vars(replace(case.options, micro_batches=1, versions=()))}"
    if key not in _references:
        _references[key], _ = alone(here(), case.options, lesson, case.version, optimizer)
    return _references[key]


def _on_ranks(rt: Runtime, of: tuple[LessonOf, Case], optimizer: str) -> Followed:
    lesson_of, case = of
    return on_ranks(rt, case.options, lesson_of(case), case.version, optimizer)[0]


def equal_to_one_device(world: int, lesson_of: LessonOf, cases: Mapping[str, Case]) -> None:
    """Assert that every case on `world` ranks equals one device to 1e-12; check the bytes against the formula.

    Each case has each optimizer on one and two ranks, and one in turn on more: gradients are compared with both.
    lesson_of: a function of the test module, which ranks import: lessons hold what does not pickle.
    """
    turns = itertools.cycle([*OPTIMIZERS])
    references = {
        (name, optimizer): reference(case, lesson_of(case), optimizer)
        for name, case in cases.items()
        for optimizer in (OPTIMIZERS if world <= 2 else [next(turns)])
    }
    assert_equal(world, _on_ranks, {name: (lesson_of, case) for name, case in cases.items()}, references)
