"""The times of a pipeline's stages: what their layers' operations take, forward and in the two halves of backward.

stages(job, plan)       -> Stage of each chunk of layers, first to last, for one micro-batch
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from common.models.configs import TransformerConfig

from plan_job import Job
from plan_layout import Plan
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

    def __add__(self, o: Stage) -> Stage:
        return Stage(
            *(self.forward + o.forward, self.inputs + o.inputs, self.weights + o.weights),
            *(self.tp + o.tp, self.sp + o.sp, self.ep + o.ep, self.pp + o.pp),
        )

    def times(self, n: int) -> Stage:
        """Return the times of so many such layers."""
        return Stage(
            n * self.forward, n * self.inputs, n * self.weights, n * self.tp, n * self.sp, n * self.ep
        )


def stages(job: Job, plan: Plan) -> tuple[Stage, ...]:
    """Return the times of all stages, first to last, messages along pp included where the code waits for them."""
    return _stages(job, replace(plan, zero=0))


@lru_cache(maxsize=100_000)
def _stages(job: Job, plan: Plan) -> tuple[Stage, ...]:
    inside = replace(plan, pp=1, dp=1, schedule="1f1b", chunks=1)  # all that a layer's time depends on
    number = plan.pp * plan.chunks
    each = [layer_times(job, inside, shape) for shape in job.kinds]
    made: dict[tuple[int, ...], Stage] = {}
    out = []
    for i, counts in enumerate(job.layers(number)):
        if counts not in made:
            made[counts] = sum((one.times(n) for one, n in zip(each, counts, strict=True)), Stage())
        stage = made[counts]
        if i in (0, number - 1):
            ends = [
                end_times(job, inside, first) for first in (True, False) if i == (0 if first else number - 1)
            ]
            stage = sum(ends, stage)
        if plan.pp > 1 and not (job.code.overlaps_messages and job.machine.overlaps):
            stage += message_times(job, plan, i)
        out.append(stage)
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
    if backward.host > backward.device:  # the host launches both halves
        weights *= backward.host / backward.device
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
