"""Museum of silent bugs, pipelines: each bug trains without a crash, and every shape is right.

For each bug the broken version runs first and must be caught, then the right one must pass. The check is
equality with one device in every gradient and weight; `pytest -s tests/test_museum_pp.py` prints the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from typing import Any

import pytest
import torch
from museum import UNSEEN, Found, tour, worst_of
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import sum_gradients
from common.launch.runtime import Runtime
from common.lesson.equality import OPTIMIZERS, Difference, Followed, compare, watch
from common.lesson.job import Job, one_device, total
from common.lesson.training import make_model

from pp_pipeline import Pipeline
from pp_schedule import Instruction
from pp_schedules import make_schedule
from pp_training import PipelineOptions

OPTIONS = PipelineOptions(model="gpt2-tiny", batch=8, micro_batches=4, sequence=12, steps=3)

Prepare = Callable[[Pipeline, Mesh], None]


def scaled(factor: float, pipe: Pipeline, mesh: Mesh) -> None:
    """Broken: does not divide a mean loss per micro-batch by their number, or divides it twice."""
    run = pipe.executor.run
    pipe.run = lambda parts, scale, begin: run(parts, scale * factor, begin)  # type: ignore[method-assign]


def drifting(pipe: Pipeline, mesh: Mesh) -> None:
    """Broken: the embedding and the tied head each keep their own gradient."""
    pipe.finish = lambda: None  # type: ignore[method-assign]


def synchronised_before(last: int, pipe: Pipeline, mesh: Mesh) -> None:
    """Sum gradients over replicas after `last` backward passes of a stage: broken if more passes follow."""
    compute, parameters = pipe.executor.compute, list(pipe.model.parameters())
    done = 0

    def counted(i: Instruction) -> None:
        nonlocal done
        compute(i)
        done += i.op == "B"
        if i.op == "B" and done % OPTIONS.micro_batches == last % OPTIONS.micro_batches:
            sum_gradients(parameters, mesh)

    pipe.executor.compute = counted  # type: ignore[method-assign]


PIPES = count()  # the same numbers on both ranks


def late_receiver(pipe: Pipeline, mesh: Mesh) -> None:
    """Start rank 1 after rank 0 has sent all activations: all are in flight at once, which is right."""
    run, send, store = pipe.executor.run, pipe.executor.send, _get_default_store()
    key, sent, begun = f"pipe {next(PIPES)}, sent", count(1), count(1)

    def counted(i: Instruction) -> None:
        send(i)
        store.set(f"{key} {next(sent)}", "")

    def late(*given: Any) -> Tensor:
        store.wait([f"{key} {next(begun) * OPTIONS.micro_batches}"])
        return run(*given)

    if mesh.at["pp"] == 0:
        pipe.executor.send = counted  # type: ignore[method-assign]
    else:
        pipe.run = late  # type: ignore[method-assign]


def one_buffer(pipe: Pipeline, mesh: Mesh) -> None:
    """Broken: sends every activation from the same buffer, while the one before may still be in flight."""
    late_receiver(pipe, mesh)
    executor, send = pipe.executor, pipe.executor.send
    buffers: dict[str, Tensor] = {}

    def reusing(i: Instruction) -> None:
        key = (i.op[1], i.stage + (1 if i.op == "SX" else -1), i.micro)
        x = executor.here[key]
        executor.here[key] = buffers.setdefault(i.op, torch.empty_like(x)).copy_(x)
        send(i)

    executor.send = reusing  # type: ignore[method-assign]


EXHIBITS: dict[str, tuple[str, int, Prepare]] = {  # schedule, replicas, what is done to it
    "a loss that is not divided by the micro-batches": ("1f1b", 1, partial(scaled, OPTIONS.micro_batches)),
    "a loss that is divided twice": ("1f1b", 1, partial(scaled, 1 / OPTIONS.micro_batches)),
    "a tied embedding whose two copies drift": ("1f1b", 1, drifting),
    "replicas synchronised one micro-batch early": (
        "1f1b",
        2,
        partial(synchronised_before, OPTIONS.micro_batches - 1),
    ),
    "activations overwritten before the send has left": ("gpipe", 1, one_buffer),
    "right": ("1f1b", 1, lambda pipe, mesh: None),
    "right, replicas": ("1f1b", 2, partial(synchronised_before, OPTIONS.micro_batches)),
    "right, late": ("gpipe", 1, late_receiver),
}


def train(job: Job[PipelineOptions]) -> Iterator[Tensor]:
    """Train an exhibit, whose replicas have samples of their own; yield the loss of each batch."""
    schedule, _, prepare = EXHIBITS[job.version]
    pipe = Pipeline(job.model, job.mesh, make_schedule(schedule, 2, OPTIONS.micro_batches))
    prepare(pipe, job.mesh)
    optimizer = job.optimizer(job.model)
    for batch in job.batches():
        count = batch.count_targets(job.group)
        optimizer.zero_grad()
        loss_sum = pipe.run(batch.parts, 1 / count, batch.begin)
        pipe.finish()
        optimizer.step()
        yield total([loss_sum / count], job.group)


@cache
def alone(rt: Runtime, optimizer: str) -> Followed:
    """Return the run on one device, the same for all exhibits."""
    o, make = OPTIONS, OPTIMIZERS[optimizer]
    job = Job(rt, o, "right", make_model(o, rt.device), Mesh(Group.alone()), "dp", make, o.steps)
    return watch(one_device(job), job)


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    o, mesh = OPTIONS, Mesh(rt.world, pp=2, dp=EXHIBITS[name][1])
    job = Job(rt, o, name, make_model(o, rt.device), mesh, "dp", OPTIMIZERS[optimizer], o.steps)
    return compare(alone(rt, optimizer), watch(train(job), job, mesh))


def caught(name: str, found: Found) -> None:
    assert found["sgd"]["gradients"].value > 1e-3
    assert found["sgd"]["weights"].value > 1e-6
    assert found["adamw"]["loss"].value < UNSEEN


visited, test_exhibit = tour(visit, EXHIBITS, caught, ranks=lambda name: 2 * EXHIBITS[name][1])


def test_adamw_hides_what_sgd_shows(visited: dict[str, list[Found]]) -> None:
    """With gradients 4 times too large, AdamW's loss is right to 3 digits: a loss curve proves nothing."""
    found = worst_of(visited["a loss that is not divided by the micro-batches"])
    assert found["adamw"]["gradient norm"].value == pytest.approx(OPTIONS.micro_batches - 1, rel=3e-2)
    assert found["adamw"]["loss"].value < 1e-3  # at most 9e-5 in 35 texts and seeds
    assert found["sgd"]["loss"].value > 3e-3  # at least 0.03
    assert found["sgd"]["loss"].value > 30 * found["adamw"]["loss"].value
