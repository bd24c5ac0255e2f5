"""Four dimensions: pipeline, data and tensor parallelism, and the sequence, for contexts too long for a rank.

    8 ranks, --sp 2 --tp 2 (and dp 2): a sample of 32 tokens in zigzag order          rank = (d * sp + s) * tp + t

              s = 0: tokens 0..7, 24..31        s = 1: tokens 8..23
    d = 0     [ 0 --tp-- 1 ]  <- keys, values ->  [ 2 --tp-- 3 ]           samples 0 to 3
    d = 1     [ 4 --tp-- 5 ]  <- keys, values ->  [ 6 --tp-- 7 ]           samples 4 to 7

A rank holds its heads (tp) of its tokens (sp): the ring of rank 1 is {1, 3} and carries only the keys of rank
1's heads, half the bytes of a ring without tp. For the weights sp is one more data axis: their gradients are
summed over dp and sp together, in one message.

    python hybrid_4d.py --nproc 8 --sp 2 --tp 2                 mpirun -np 8 python hybrid_4d.py --pp 2 --sp 2 --tp 2
    torchrun --nproc_per_node=8 hybrid_4d.py --sp 4 --pp 2 --attention ulysses
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from common.comm.placement import TOKEN_AXES, clip_gradients, sum_tied_gradients
from common.launch.runtime import Runtime
from common.lesson.job import Job, total
from common.lesson.runner import run

from dp_zero import Zero
from hybrid_experts import split
from hybrid_initial import from_seed, materialise
from hybrid_layout import HybridOptions
from hybrid_model import between_stages, gradient_groups, make_groups, ring_kernel
from hybrid_training import lesson
from pp_pipeline import Pipeline
from pp_schedules import make_schedule
from sp_sequence_parallel import ORDERS, sequence_parallel, split_sequence
from tp_megatron import tensor_parallel


@dataclass
class Options(HybridOptions, without=("ep",)):
    """Options: a dense model on pp, dp, sp and tp."""

    model: str = "llama-tiny"
    """Name of a model in common/models/configs.py."""


def train(job: Job[Options]) -> Iterator[Tensor]:
    """Train on pp, dp, sp and tp; yield the loss of each global batch."""
    model, mesh, o = job.model, job.mesh, job.options  # a plain model on "meta": shapes, no values
    region = tensor_parallel(model, mesh.group("tp"), o.sequence_parallel, split) if o.tp > 1 else None
    if o.sp > 1:
        sequence_parallel(model, mesh.group("sp"), o.attention, ring_kernel(job.rt.device))
    make_groups(model, mesh)  # on all ranks in one order, before they hold different parameters
    schedule = make_schedule(o.schedule, o.pp, o.micro_batches, o.chunks)
    between = between_stages(model, region)  # the shape of what one stage sends to the next
    pipe = Pipeline(model, mesh, schedule, checkpointing=o.checkpointing, shape=between)  # chapter 02: layers
    materialise(model, mesh, job.rt.device, from_seed(model, o.seed))  # values, of this rank's shards alone
    layers, stages = model.layers.children(), [*pipe.stages.values()]
    zero = Zero(model, layers, gradient_groups(mesh), o.zero, stages)  # chapter 01: sums, shards
    optimizer = job.optimizer(zero)  # SGD or AdamW: the runner's choice
    parameters = [p for _, p in zero.named_parameters()]
    no_sync = zero.no_sync if o.zero < 2 else nullcontext  # ZeRO 2 and 3 sum after every micro-batch
    tokens = mesh.group(*TOKEN_AXES)  # the ranks that see different tokens
    cut = partial(split_sequence, group=mesh.group("sp"), order=ORDERS[o.attention])
    for batch in job.batches():  # samples of this rank's place along dp
        if o.sp > 1:
            batch = batch.cut(cut)  # this rank's tokens of each sample
        count = batch.count_targets(tokens)  # of all ranks: an all-reduce of 8 bytes
        optimizer.zero_grad()
        with nullcontext() if o.overlap else no_sync():  # sums begin in the last micro-batch's backward pass
            loss_sum = pipe.run(batch.parts, 1 / count, batch.begin, no_sync)  # the passes, by the schedule
        zero.finish()  # wait for the sums
        sum_tied_gradients(parameters)  # last, so that the holders of a tied head step with the same bits
        if o.clip:
            clip_gradients(parameters, mesh, o.clip)
        optimizer.step()
        yield total([loss_sum], tokens) / count


def main(rt: Runtime, o: Options) -> bool:
    """Compare four dimensions with one device; with --benchmark only time them."""
    return lesson(rt, o, train)


if __name__ == "__main__":
    run(main, Options)
