"""The time of a training step: stages' passes, put together by the schedule, then gradients and the optimizer.

    predict(job, plan)      -> Prediction

A pass of a stage takes what its operations take on the device, or what the host takes to launch them. The simulator of
chapter 02 runs the schedule with these times, so that every schedule and every uneven stage is counted the same way.
Where ranks share cores, as on a laptop, a step takes at least what all of them together ask of the cores.
Then come the sums of gradients along dp, ep and sp, as far as no backward pass hides them, and the optimizer.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import plan_size
from plan_job import Job
from plan_layout import Plan
from plan_machine import Ring
from plan_memory import layers_of, parameters
from plan_size import Parameters
from plan_stage import Stage, stages
from pp_schedule import Instruction, Schedule
from pp_schedules import KINDS
from pp_simulator import Timeline, simulate

# read and written per parameter: its gradient, in 16 and in 32 bits; the norm; AdamW; weights in 32 and in 16 bits
OPTIMIZER_BYTES = 50


@dataclass(frozen=True)
class Prediction:
    """Predicted step of a plan, in seconds."""

    step: float
    pipeline: float
    """From the first forward pass to the last backward pass."""
    busy: float
    """Seconds in which the busiest rank computes."""
    gradients: float
    """Sums of gradients and gathers of weights that nothing hides."""
    optimizer: float
    axes: dict[str, float]
    """Seconds of the busiest rank's collectives within passes, by axis; along pp, of messages that it waits for."""
    mfu: float
    """Share of the ranks' peak that the model's operations take."""

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time in which the busiest rank waits."""
        return max(0.0, 1 - self.busy / self.pipeline)


def predict(job: Job, plan: Plan) -> Prediction:
    """Return the time of a step."""
    M, parts = plan.micro_batches(job.batch), stages(job, plan)
    busiest = max(of_ranks(plan, parts), key=lambda s: s.total)
    slowdown = job.machine.slowdown(plan.ranks)
    alone = M * busiest.total
    length = max(pipeline(plan, M, parts), slowdown * M * _mean_busy(plan, parts))
    stretch = max(1.0, min(slowdown, length / alone))  # of the busiest rank, by others on its core
    gradients = slowdown * gradient_time(job, plan, min(s.backward for s in parts))
    optimizer = slowdown * optimizer_time(job, plan)
    step = length + gradients + optimizer + job.machine.step
    axes = {axis: stretch * M * getattr(busiest, axis) for axis in ("pp", "ep", "sp", "tp")}
    mfu = job.flops / plan.ranks / step / job.peak
    return Prediction(step, length, stretch * alone, gradients, optimizer, axes, mfu)


def bound(job: Job, plan: Plan) -> float:
    """Return seconds that a step takes at least.

    A rank computes all micro-batches of its stages, after the first one has passed the stages before its own; and,
    where backward passes are not split, before the last one has gone back through them.
    """
    M, parts = plan.micro_batches(job.batch), stages(job, plan)
    owner = KINDS[plan.schedule].owner(plan.pp, plan.chunks)
    split_backward = plan.schedule.startswith("zb")
    longest = around = 0.0
    for rank, mine in enumerate(of_ranks(plan, parts)):
        longest = max(longest, around + M * mine.total)
        if owner[rank] == rank:  # stages 0 to pp - 1 lie on ranks in their order
            around += parts[rank].forward + (0 if split_backward else parts[rank].backward)
    slowdown = job.machine.slowdown(plan.ranks)
    longest = max(longest, slowdown * M * _mean_busy(plan, parts))
    rest = gradient_time(job, plan, min(s.backward for s in parts)) + optimizer_time(job, plan)
    return longest + slowdown * rest + job.machine.step


def _mean_busy(plan: Plan, parts: tuple[Stage, ...]) -> float:
    """Return the seconds that a rank computes per micro-batch, on average: what they together ask of shared cores."""
    return sum(s.total for s in parts) / plan.pp


def of_ranks(plan: Plan, parts: tuple[Stage, ...]) -> list[Stage]:
    """Return the times of each rank along pp: those of its stages together."""
    mine = [Stage()] * plan.pp
    for owner, stage in zip(KINDS[plan.schedule].owner(plan.pp, plan.chunks), parts, strict=True):
        mine[owner] += stage
    return mine


def pipeline(plan: Plan, micro_batches: int, parts: tuple[Stage, ...]) -> float:
    """Return the seconds from the first forward pass to the last backward pass.

    A schedule repeats itself once it has begun: where two lots of pp micro-batches have added the same time, each
    further lot does, too. While they add less than the busiest rank computes, it still puts weights' gradients off.
    """
    if plan.pp == 1:
        return micro_batches * sum(s.total for s in parts)
    p, count = plan.pp, micro_batches % plan.pp + plan.pp
    least = 0.999 * max(s.total for s in of_ranks(plan, parts))
    lengths: list[float] = []
    while count < micro_batches:
        lengths.append(float(timeline(plan, count, parts).length))
        added = [b - a for a, b in itertools.pairwise(lengths[-3:])]
        if len(added) == 2 and math.isclose(*added, rel_tol=1e-6) and added[1] >= p * least:
            return lengths[-1] + added[1] * (micro_batches - count) / p
        count += p
    return float(timeline(plan, micro_batches, parts).length)


def timeline(plan: Plan, micro_batches: int, parts: tuple[Stage, ...]) -> Timeline:
    """Return what each rank computes when."""

    def takes(i: Instruction) -> float:
        s = parts[i.stage]
        return (
            s.forward
            if i.op == "F"
            else s.inputs
            if i.op == "I"
            else s.weights
            if i.op == "W"
            else s.backward
        )

    return simulate(computations(plan.schedule, plan.pp, micro_batches, plan.chunks), takes)


@lru_cache(maxsize=64)
def computations(kind: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Return a schedule's computations, without messages."""
    owner = KINDS[kind].owner(ranks, chunks)
    mine = [tuple(stage for stage, of in enumerate(owner) if of == rank) for rank in range(ranks)]
    lists = tuple(tuple(KINDS[kind].generator(of_rank, ranks, micro_batches)) for of_rank in mine)
    return Schedule(kind, micro_batches, owner, lists)


def largest(job: Job, plan: Plan) -> Parameters:
    """Return the parameters of the rank along pp that holds most."""
    # plans that differ in nothing else hold as many, and a search asks for all of them
    return _largest(job, replace(plan, zero=0, micro_batch=1, kept="all"))


@lru_cache(maxsize=100_000)
def _largest(job: Job, plan: Plan) -> Parameters:
    ranks = [parameters(job, plan, *layers_of(job, plan, rank)) for rank in range(plan.pp)]
    return max(ranks, key=lambda p: p.dense + p.experts)


def gradient_time(job: Job, plan: Plan, hides: float) -> float:
    """Return the exposed seconds of gradient sums and of ZeRO's gathers.

    hides: seconds of the backward pass of one micro-batch, behind which sums may run.
    """
    links, p, c = job.machine.links, largest(job, plan), job.config
    ways, parts = plan.expert_ranks
    between = plan.tp, ways * parts  # ranks that lie between two holders of the same parameters
    took = 0.0
    for numbers, size, stride in zip((p.dense, p.experts), plan.holders, between, strict=True):
        if numbers and size > 1:
            ring = Ring(size, max(1, min(size, links.ranks_per_host // stride)))
            took += sums(job, plan, numbers, ring)
    if job.code.overlaps_gradients and job.machine.overlaps and took:
        passes = plan.micro_batches(job.batch) if plan.zero == 3 else 1
        took = max(took * plan.pp / c.layers, took - hides * passes)
    if c.tied and plan.pp > 1:
        tied = job.code.gradient_bytes * plan_size.embedding(c, plan).dense
        took += links.all_reduce(tied, Ring(2, 1 + (plan.ranks <= links.ranks_per_host)))
    return took


def sums(job: Job, plan: Plan, numbers: float, ring: Ring) -> float:
    """Return the seconds to sum so many gradients, and to gather weights where ZeRO has split them."""
    M, links = plan.micro_batches(job.batch), job.machine.links
    reduce = links.gather(job.code.gradient_bytes * numbers, ring)
    gather = links.gather(job.code.weight_bytes * numbers, ring)
    reduces = {0: 2, 1: 1, 2: M, 3: M}[plan.zero]
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * M}[plan.zero]
    return reduces * reduce + gathers * gather


def optimizer_time(job: Job, plan: Plan) -> float:
    """Return the seconds in which the optimizer updates a rank's parameters, or its share of them."""
    p, (dense, experts) = largest(job, plan), plan.holders if plan.zero else (1, 1)
    return job.machine.moved(OPTIMIZER_BYTES * (p.dense / dense + p.experts / experts))
