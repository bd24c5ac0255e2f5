"""Shared parts of the lessons of chapter 02: options, the model in stages, the proof and the bubbles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from torch import Tensor

from common import comm
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Size, Within
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job
from common.lesson.training import TrainingOptions, make_model, timed_adamw

from pp_bubble import measure, waits
from pp_costs import step_bytes
from pp_kind import Kind
from pp_pipeline import Pipeline
from pp_schedule import Schedule
from pp_stages import by_cost, evenly, measured_costs


@dataclass
class PipelineOptions(TrainingOptions):
    """Options of the lessons of chapter 02: model, batch and schedule."""

    model: str = "gpt2-deep"
    """A name of common/models/configs.py."""
    batch: Size = 11
    """Number of samples in the batch; all pass through every stage."""
    micro_batches: Size = 8
    """Number of parts into which the batch is cut; they differ by at most one sample."""
    chunks: Annotated[int, Within(1, 1000)] = 2
    """Number of stages per rank in the interleaved schedule."""
    balance: Literal["layers", "cost"] = "layers"
    """Stages of equally many layers, or of equal time by rank 0's measurement of layers, embeddings, head."""
    checkpointing: bool = False
    """Keep only the input of each layer, and recompute the layer for its backward pass."""


@dataclass
class InOrderOptions(PipelineOptions, without=("chunks",)):
    """Options of the schedules that fix the number of stages per rank."""


O = TypeVar("O", bound=PipelineOptions)  # noqa: E741


def timed_job(rt: Runtime, o: PipelineOptions, name: str) -> Job[Any]:
    """Return a run of the version `name` on all ranks along pp, for measurements beside the proof."""
    mesh = Mesh(rt.world, pp=rt.world_size, timeout=rt.timeout)
    return Job(rt, o, name, make_model(o, rt.device), mesh, "pp", timed_adamw)


def pipeline(job: Job[Any], schedule: Schedule) -> Pipeline:
    """Cut the job's model into stages, evenly or by cost, and return the pipeline that runs them."""
    o, cuts = job.options, None
    if o.balance == "cost":
        part = next(job.batches()).parts[0]
        layers, before, after = comm.everyones(measured_costs(job.model, *part), job.rt.world)[0]
        cuts = by_cost(layers, schedule.stages, before, after)
    return Pipeline(job.model, job.mesh, schedule, cuts, o.checkpointing)


def check(rt: Runtime, o: O, kinds: Mapping[str, Kind]) -> O:
    """Return the options, with all of `kinds`, a kind of schedule per version, if they name no versions.

    Raises UsageError for options that cannot run, before any rank waits for another.
    """
    o = replace(o, versions=o.versions or tuple(kinds))
    comparison.check(rt, tuple(kinds), o)
    c = o.model_config()
    if c.positions == "learned" and o.sequence > c.sequence:
        raise UsageError(
            f"--sequence {o.sequence} is too long for {o.model}, which has {c.sequence} learned positions"
        )
    if o.micro_batches > o.batch:
        raise UsageError(
            f"--batch {o.batch} cannot be cut into {o.micro_batches} micro-batches; give between 1 and {o.batch}"
        )
    evenly(c.layers, max(len(kinds[name].owner(rt.world_size, o.chunks)) for name in o.versions))
    return o


def check_torch(rt: Runtime, o: PipelineOptions) -> None:
    """Raise UsageError for options that torch.distributed.pipelining cannot run."""
    if o.batch % o.micro_batches:
        near = max(1, o.batch // o.micro_batches) * o.micro_batches
        raise UsageError(
            f"--batch {o.batch}: torch wants equal micro-batches; {near} divides into {o.micro_batches}"
        )
    M, n = o.micro_batches, rt.world_size
    if n > M or M % (M // n):
        raise UsageError(
            f"--micro-batches {M}: torch wants at least as many as ranks, in groups of one length; "
            f"{max(1, M // n) * n} would do"
        )
    if o.model_config().dropout:
        raise UsageError(f"--model {o.model}: torch's schedules are shown without dropout")
    if rt.world_size == 1:
        raise UsageError("torch.distributed.pipelining needs a process group: start at least 2 ranks")


def lesson(
    rt: Runtime, o: PipelineOptions, train: Callable[..., Iterator[Tensor]], kinds: Iterable[Kind]
) -> bool:
    """Prove and time train(job, kind) for each kind of schedule; then print the bubbles.

    These are by formula, simulated and measured.
    """
    by_name = {kind.name: kind for kind in kinds}
    o = check(rt, o, by_name)
    versions = {name: partial(train, kind=kind) for name, kind in by_name.items()}
    proved = Lesson("pp", versions, step_bytes(by_name))
    beside = replace(o, plot=None)  # --plot draws the timelines of `waits`
    right = (time_in_turn if o.benchmark else prove)(rt, beside, proved)
    measured = []
    for kind in map(by_name.__getitem__, o.versions):
        schedule, job = kind.schedule(rt.world_size, o.micro_batches, o.chunks), timed_job(rt, o, kind.name)
        measured.append((kind, schedule, measure(pipeline(job, schedule).executor, job)))
    waits(rt, o, measured)
    return right
