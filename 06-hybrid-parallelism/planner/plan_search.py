"""Search: all plans of a job on so many ranks, the refused ones with a reason, the best ones by predicted time.

    found = search(job, ranks=1024, wanted={"tp": 8}, keep=10)
    refusal(job, plan)      -> why a plan cannot run, in one line, or None

Plans are taken in the order of `bound`, a time that each cannot beat. Once the next one's bound is above the last of
the best, no other plan can be among them, and the search ends: most plans are never simulated, and their memory is
never counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from plan_job import Job
from plan_layout import AXES, Kept, Plan
from plan_memory import Memory, memory
from plan_time import Prediction, bound, gradient_time, predict
from pp_schedules import KINDS

GIB = 2**30


@dataclass(frozen=True)
class Choice:
    """A plan that can run, with its prediction."""

    plan: Plan
    time: Prediction
    memory: Memory


@dataclass
class Found:
    """Result of a search: the best plans, and how many were looked at."""

    best: list[Choice] = field(default_factory=list)
    plans: int = 0
    """Plans of which the layout is possible."""
    simulated: int = 0
    too_large: int = 0
    """Plans that need more memory than a rank has, of those that were reached."""
    smallest: tuple[float, Plan] | None = None
    """The least bytes of a plan that was too large, and that plan."""


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of a number, smallest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return (*small, *(n // d for d in reversed(small) if d * d != n))


def meshes(job: Job, ranks: int) -> Iterator[dict[str, int]]:
    """Yield every mesh of so many ranks whose axes the model allows."""
    c = job.config
    for tp in divisors(ranks):
        if c.heads % tp:
            continue
        for pp in divisors(ranks // tp):
            if pp > c.layers:
                break
            for sp in divisors(ranks // tp // pp):
                if sp > 1 and job.sequence % (2 * sp):
                    continue
                left = ranks // tp // pp // sp
                for ep in divisors(left) if c.experts else (1,):
                    if ep == 1 or c.experts % ep == 0:
                        yield dict(zip(AXES, (pp, left // ep, ep, sp, tp), strict=True))


def pipelines(job: Job, pp: int) -> Iterator[tuple[str, int]]:
    """Yield schedules with their chunks. GPipe is left out: 1F1B takes as long and holds less."""
    yield "1f1b", 1
    if pp == 1:
        return
    yield "zb-h1", 1
    most = job.config.layers // pp
    if most < 2:
        return
    yield "zb-v", 2
    for chunks in sorted({most, *(2**i for i in range(1, most.bit_length()))}):
        yield "interleaved", chunks


def plans(job: Job, ranks: int, wanted: Mapping[str, object]) -> Iterator[Plan]:
    """Yield every plan with a layout that can run and with the wanted values, by field name."""

    def fits(plan: Plan) -> bool:
        return all(getattr(plan, name) == value for name, value in wanted.items())

    kept: tuple[Kept, ...] = ("all", "inputs") if job.code.fused_attention else ("all", "no scores", "inputs")
    for mesh in meshes(job, ranks):
        places = mesh["dp"] * mesh["ep"]
        if job.batch % places or any(mesh[axis] != wanted.get(axis, mesh[axis]) for axis in AXES):
            continue
        sizes, sliced = (
            divisors(job.batch // places),
            mesh["tp"] > 1 and wanted.get("sequence_parallel") is not False,
        )
        choices = itertools.product(pipelines(job, mesh["pp"]), stages_of_zero(mesh), sizes, kept)
        for (schedule, chunks), zero, micro_batch, keeps in choices:
            plan = Plan(
                **mesh,
                micro_batch=micro_batch,
                schedule=schedule,
                chunks=chunks,
                zero=zero,
                sequence_parallel=sliced,
                kept=keeps,
            )
            if fits(plan):
                yield plan


def stages_of_zero(mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Return the stages of ZeRO to try: 2 and 3 repeat their messages for each micro-batch, so not with pp."""
    if mesh["dp"] * mesh["ep"] * mesh["sp"] == 1:
        return (0,)
    return (0, 1, 2, 3) if mesh["pp"] == 1 else (0, 1)


def search(job: Job, ranks: int, wanted: Mapping[str, object], keep: int = 10) -> Found:
    """Return the plans with the least predicted time."""
    found, room = Found(), job.machine.memory - job.machine.reserved
    queue = sorted(
        ((bound(job, plan), i, plan) for i, plan in enumerate(plans(job, ranks, wanted))), key=lambda x: x[:2]
    )
    found.plans = len(queue)
    for least, _, plan in queue:
        if len(found.best) == keep and least >= found.best[-1].time.step:
            break
        needs = memory(job, plan)
        if needs.total > room:
            found.too_large += 1
            if found.smallest is None or needs.total < found.smallest[0]:
                found.smallest = needs.total, plan
            continue
        found.simulated += 1
        found.best.append(Choice(plan, predict(job, plan), needs))
        found.best.sort(key=lambda choice: choice.time.step)
        del found.best[keep:]
    return found


def refusal(job: Job, plan: Plan) -> str | None:
    """Return the reason for which a plan cannot run, or None."""
    c, places = job.config, plan.samples
    stages = plan.pp * (KINDS[plan.schedule].chunks or plan.chunks)
    if c.heads % plan.tp:
        fits = ", ".join(str(n) for n in divisors(c.heads))
        return f"tp={plan.tp}: the {c.heads} heads do not divide over it; {fits} would do"
    if stages > c.layers:
        return f"{stages} stages: the model has {c.layers} layers, one at least for each"
    if plan.ep > 1 and (not c.experts or c.experts % plan.ep):
        return f"ep={plan.ep}: the model has {c.experts} experts, which do not divide over it"
    if plan.sp > 1 and job.sequence % (2 * plan.sp):
        return f"sp={plan.sp}: a sequence of {job.sequence} tokens does not divide into {2 * plan.sp} pieces"
    if job.batch % (places * plan.micro_batch):
        return (
            f"dp={plan.dp} ep={plan.ep} micro-batch={plan.micro_batch}: a batch of {job.batch} samples does not divide "
            f"into {places} places of whole micro-batches"
        )
    if plan.zero > 1 and plan.pp > 1:
        what = "reduces all gradients" if plan.zero == 2 else "gathers all weights"
        many, once = (gradient_time(job, replace(plan, zero=zero), hides=0) for zero in (plan.zero, 1))
        return (
            f"zero={plan.zero}: with pp above 1 each of {plan.micro_batches(job.batch)} micro-batches {what} again, "
            f"{many:.3g} s of messages in a step; zero=1 splits the states, {once:.3g} s"
        )
    needs, room = memory(job, plan).total, job.machine.memory - job.machine.reserved
    if needs > room:
        return f"memory: {needs / GIB:.1f} GiB a rank, of which {job.machine.name} has {room / GIB:.1f}"
    return None
