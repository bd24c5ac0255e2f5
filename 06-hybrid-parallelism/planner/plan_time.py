"""The time of a training step: stages' passes, put together by the schedule, then gradients and the optimizer.

    predict(config, plan, code, machine, batch=1024, sequence=4096)      -> Prediction

A pass of a stage takes what its operations take on the device, or what the host takes to launch them. The simulator of
chapter 02 runs the schedule with these times, so that every schedule and every uneven stage is counted the same way.
Then come the sums of gradients along dp, ep and sp, as far as no backward pass hides them, and the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from common.models.configs import TransformerConfig

import plan_size
from plan_layout import Code, Plan, split
from plan_machine import SIZES, Links, Machine, Ring
from plan_models import layer_shapes
from plan_size import Parameters, flops_per_token
from plan_work import Operation, Product, Seconds, embedding, head, layer, seconds
from pp_schedule import Instruction, Schedule
from pp_schedules import KINDS
from pp_simulator import simulate

OPTIMIZER_BYTES = (
    50  # read and written per parameter: gradient to 32 bits, its norm, AdamW, weights to 16 bits
)
LONGEST = 3  # micro-batches per rank that are simulated; more repeat what they do


@dataclass(frozen=True)
class Stage:
    """Seconds of the passes of one stage for one micro-batch, messages included."""

    forward: float
    inputs: float
    """The half of the backward pass that the stage before waits for, with what is computed again."""
    weights: float
    """The half that the optimizer waits for."""

    @property
    def backward(self) -> float:
        return self.inputs + self.weights

    @property
    def total(self) -> float:
        return self.forward + self.backward


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
    """Seconds of a rank's collectives within passes, by axis; of messages along pp."""
    flops: float
    """Operations of the model in a step, per rank."""
    mfu: float
    """Share of the rank's peak that these operations take."""

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time in which the busiest rank waits."""
        return 1 - self.busy / self.pipeline


def predict(
    c: TransformerConfig, plan: Plan, code: Code, machine: Machine, batch: int, sequence: int
) -> Prediction:
    """Return the time of a step of `batch` samples of `sequence` tokens."""
    M = plan.micro_batches(batch)
    stages = stage_times(c, plan, code, machine, sequence)
    length = pipeline(plan, M, tuple(stages))
    mine = [sum(s.total for s in stages[rank :: plan.pp]) for rank in range(plan.pp)]
    if plan.schedule == "zb-v":
        mine = [stages[rank].total + stages[-1 - rank].total for rank in range(plan.pp)]
    gradients = gradient_time(c, plan, code, machine, min(s.backward for s in stages), M)
    optimizer = optimizer_time(c, plan, machine)
    step = length + gradients + optimizer + machine.step
    flops = flops_per_token(c, sequence) * batch * sequence / plan.ranks
    axes = axis_times(c, plan, code, machine, sequence, M)
    return Prediction(
        step,
        length,
        M * max(mine),
        gradients,
        optimizer,
        axes,
        flops,
        flops / step / machine.peak[code.dtype],
    )


def stage_times(c: TransformerConfig, plan: Plan, code: Code, machine: Machine, sequence: int) -> list[Stage]:
    """Return the times of all stages, first to last."""
    count = plan.pp * plan.chunks
    shapes = layer_shapes(c)
    each = {shape: _stage(layer(shape, plan, code, sequence), plan, code, machine) for shape in set(shapes)}
    ends = [_stage(work(c, plan, code, sequence), plan, code, machine) for work in (embedding, head)]
    tokens = plan.micro_batch * sequence / plan.sp
    nbytes = tokens * c.width * SIZES[code.dtype] / plan.tp
    stages = []
    for number, chunk in enumerate(split(shapes, count)):
        parts = [each[shape] for shape in chunk] + ends[:1] * (number == 0) + ends[1:] * (number == count - 1)
        send = 0.0
        if plan.pp > 1 and not code.overlaps_messages:
            send = machine.links.send(nbytes, _far(plan, number % plan.pp, machine.links.ranks_per_host))
        stages.append(
            Stage(
                sum(p.forward for p in parts) + send,
                sum(p.inputs for p in parts) + send,
                sum(p.weights for p in parts),
            )
        )
    return stages


def _far(plan: Plan, stage: int, ranks_per_host: int) -> bool:
    """Return whether the rank of the next stage, or behind the last one the first, is on another host."""
    stride = plan.stride("pp")
    here, there = stage * stride, (stage + 1) % plan.pp * stride
    return here // ranks_per_host != there // ranks_per_host


def _stage(work: list[Operation], plan: Plan, code: Code, machine: Machine) -> Stage:
    """Return the times of some operations as those of a stage."""
    forward = seconds(work, machine, plan, code)
    backward = seconds(work, machine, plan, code, backward=True)
    again = 0.0
    if plan.kept == "inputs":
        again = forward.total
    elif plan.kept == "no scores" and not code.fused_attention:
        again = seconds(_scores(work), machine, plan, code).total
    weights = [w for w in work if isinstance(w, Product) and w.weights]
    half = sum(machine.product(w.inner, w.columns, w.rows, code.dtype, w.count) for w in weights)
    half = min(half, backward.total)
    return Stage(forward.total, backward.total - half + again, half)


def _scores(work: list[Operation]) -> list[Operation]:
    """Return the operations from the first product of attention to the last."""
    places = [i for i, w in enumerate(work) if isinstance(w, Product) and not w.weights]
    return work[places[0] : places[-1] + 1] if places else []


def pipeline(plan: Plan, micro_batches: int, stages: tuple[Stage, ...]) -> float:
    """Return the seconds from the first forward pass to the last backward pass."""
    if plan.pp == 1 and plan.schedule != "zb-v":
        return micro_batches * sum(s.total for s in stages)

    def takes(i: Instruction) -> float:
        s = stages[i.stage]
        return {"F": s.forward, "B": s.backward, "I": s.inputs, "W": s.weights}[i.op]

    def length(count: int) -> float:
        return float(simulate(computations(plan.schedule, plan.pp, count, plan.chunks), takes).length)

    few = LONGEST * plan.pp + micro_batches % plan.pp
    if micro_batches <= few + plan.pp:
        return length(micro_batches)
    shorter, longer = length(few), length(few + plan.pp)
    return longer + (longer - shorter) * (micro_batches - few - plan.pp) / plan.pp


@lru_cache(maxsize=512)
def computations(kind: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Return a schedule's computations, without messages."""
    k = KINDS[kind]
    owner = k.owner(ranks, chunks)
    mine = [tuple(stage for stage, of in enumerate(owner) if of == rank) for rank in range(ranks)]
    lists = tuple(tuple(k.generator(stages, ranks, micro_batches)) for stages in mine)
    return Schedule(kind, micro_batches, owner, lists)


def largest(c: TransformerConfig, plan: Plan) -> Parameters:
    """Return the parameters of the first stage's rank, which has the embedding and the longer share of the layers."""
    shapes = layer_shapes(c)
    here = sum(
        (plan_size.layer(shape, plan) for shape in split(shapes, plan.pp)[0]), plan_size.embedding(c, plan)
    )
    return here + plan_size.head(c, plan) if plan.pp == 1 else here


def gradient_time(
    c: TransformerConfig, plan: Plan, code: Code, machine: Machine, hides: float, micro_batches: int
) -> float:
    """Return the exposed seconds of gradient sums and of ZeRO's gathers.

    hides: seconds of the backward pass of one micro-batch, behind which sums may run.
    """
    links, p = machine.links, largest(c, plan)
    ways, parts = plan.expert_ranks
    outer = plan.tp, ways * parts  # ranks that lie between two holders of the same parameters
    took = 0.0
    for numbers, size, stride in zip((p.dense, p.experts), plan.holders, outer, strict=True):
        if numbers and size > 1:
            ring = Ring(size, max(1, min(size, links.ranks_per_host // stride)))
            took += sums(numbers, ring, plan, code, links, micro_batches)
    if code.overlaps_gradients and took:
        took = max(took * plan.pp / c.layers, took - hides * (micro_batches if plan.zero == 3 else 1))
    if c.tied and plan.pp > 1:
        embedding = code.gradient_bytes * plan_size.embedding(c, plan).dense
        took += links.all_reduce(embedding, Ring(2, 1 + (plan.ranks <= links.ranks_per_host)))
    return took


def sums(numbers: float, ring: Ring, plan: Plan, code: Code, links: Links, micro_batches: int) -> float:
    """Return the seconds to sum so many gradients, and to gather weights where ZeRO has split them."""
    reduce = links.gather(code.gradient_bytes * numbers, ring)
    gather = links.gather(SIZES[code.dtype] * numbers, ring)
    times = micro_batches if plan.zero > 1 else 1
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * micro_batches}[plan.zero]
    return (times + (plan.zero == 0)) * reduce + gathers * gather


def optimizer_time(c: TransformerConfig, plan: Plan, machine: Machine) -> float:
    """Return the seconds in which the optimizer updates a rank's parameters, or its share of them."""
    p, (dense, experts) = largest(c, plan), plan.holders if plan.zero else (1, 1)
    return machine.moved(OPTIMIZER_BYTES * (p.dense / dense + p.experts / experts))


def axis_times(
    c: TransformerConfig, plan: Plan, code: Code, machine: Machine, sequence: int, micro_batches: int
) -> dict[str, float]:
    """Return the seconds that a step spends in collectives within passes, by axis."""
    work = layer(c, plan, code, sequence)
    passes: list[Seconds] = [
        seconds(work, machine, plan, code),
        seconds(work, machine, plan, code, backward=True),
    ]
    if plan.kept == "inputs":
        passes.append(passes[0])
    times = micro_batches * c.layers / plan.pp
    return {axis: times * sum(getattr(s, axis) for s in passes) for axis in ("tp", "sp", "ep")}
