"""The times of a pipeline's stages: what their layers' operations take, forward and in the two halves of backward.

stages(job, plan)       -> Stage of each chunk of layers, first to last, for one micro-batch
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from common.models.configs import TransformerConfig

from plan_job import Job
from plan_layout import Plan, split
from plan_work import Operation, Product, Seconds, embedding, head, layer, seconds


@dataclass(frozen=True)
class Stage:
    """Seconds of the passes of some layers for one micro-batch, and of their collectives by axis."""

    forward: float = 0.0
    inputs: float = 0.0
    """The half of the backward pass that the stage before waits for, with what is computed again."""
    weights: float = 0.0
    """The half that the optimizer waits for."""
    tp: float = 0.0
    sp: float = 0.0
    ep: float = 0.0
    pp: float = 0.0

    @property
    def backward(self) -> float:
        return self.inputs + self.weights

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights

    def __add__(self, other: Stage) -> Stage:
        return Stage(*(a + b for a, b in zip(self.numbers, other.numbers, strict=True)))

    def times(self, count: int) -> Stage:
        """Return the times of so many such layers."""
        return Stage(*(count * x for x in self.numbers))

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.forward, self.inputs, self.weights, self.tp, self.sp, self.ep, self.pp


def stages(job: Job, plan: Plan) -> tuple[Stage, ...]:
    """Return the times of all stages, first to last, messages along pp included where the code waits for them."""
    return _stages(job, replace(plan, zero=0))


@lru_cache(maxsize=100_000)
def _stages(job: Job, plan: Plan) -> tuple[Stage, ...]:
    inside = replace(
        plan, pp=1, dp=1, schedule="1f1b", chunks=1, zero=0
    )  # all that a layer's time depends on
    number = plan.pp * plan.chunks
    out = []
    for i, chunk in enumerate(split(job.shapes, number)):
        stage = Stage()
        for shape, count in Counter(chunk).items():
            stage += layer_times(job, inside, shape).times(count)
        if i == 0:
            stage += end_times(job, inside, first=True)
        if i == number - 1:
            stage += end_times(job, inside, first=False)
        out.append(stage + message_times(job, plan, i))
    return tuple(out)


@lru_cache(maxsize=100_000)
def layer_times(job: Job, plan: Plan, shape: TransformerConfig) -> Stage:
    """Return the times of a layer of this shape."""
    return _times(job, plan, layer(shape, plan, job.code, job.sequence))


@lru_cache(maxsize=100_000)
def end_times(job: Job, plan: Plan, first: bool) -> Stage:
    """Return the times of the embedding, or of head and loss."""
    return _times(job, plan, (embedding if first else head)(job.config, plan, job.code, job.sequence))


def message_times(job: Job, plan: Plan, stage: int) -> Stage:
    """Return the times in which a stage waits for its messages along pp."""
    if plan.pp == 1 or job.code.overlaps_messages:
        return Stage()
    tokens = plan.micro_batch * job.sequence / plan.sp
    per_host, stride = job.machine.links.ranks_per_host, plan.stride("pp")
    here, there = stage % plan.pp * stride, (stage + 1) % plan.pp * stride
    far = here // per_host != there // per_host
    send = job.machine.links.send(tokens * job.config.width * job.number_bytes / plan.tp, far)
    return Stage(forward=send, inputs=send, pp=2 * send)


def _times(job: Job, plan: Plan, work: list[Operation]) -> Stage:
    """Return the times of some operations."""
    forward = seconds(work, job.machine, plan, job.code)
    backward = seconds(work, job.machine, plan, job.code, backward=True)
    again = Seconds()
    if plan.kept == "inputs":
        again = forward
    elif plan.kept == "no scores" and not job.code.fused_attention:
        again = seconds(scores(work), job.machine, plan, job.code)
    weights = sum(
        job.machine.product(w.inner, w.columns, w.rows, job.code.dtype, w.count)
        for w in work
        if isinstance(w, Product) and w.weights
    )
    weights = min(weights, backward.total)
    axes = (
        forward.tp + backward.tp + again.tp,
        forward.sp + backward.sp + again.sp,
        forward.ep + backward.ep + again.ep,
    )
    return Stage(forward.total, backward.total - weights + again.total, weights, *axes)


def scores(work: list[Operation]) -> list[Operation]:
    """Return the operations from the first product of attention to the last."""
    places = [i for i, w in enumerate(work) if isinstance(w, Product) and not w.weights]
    return work[places[0] : places[-1] + 1] if places else []
