"""Five dimensions at once: layers over pp, samples over dp and ep, experts over ep, tokens over sp, matrices over tp.

    loss = sum over dp, ep and sp of the losses of a rank's tokens / the tokens of the global batch

                 pp              dp           ep                 sp            tp
    tokens       pass all        split        split              split         the same
    weights      of a stage      whole        whole              whole         split (norms whole)
    experts      of a stage      whole*       split              whole         split
    gradients    complete        sum          sum (experts: no)  sum           complete (routers, norms*: sum)
    messages     point to point  all-reduce   all-to-all         ring          all-reduce

    * with Megatron's sequence parallelism norms see a slice of the tokens

ZeRO splits a weight over all axes along which its gradient is a sum.

The last rows are not written down anywhere in the code: each parameter carries its placement on the mesh, and
a gradient is summed over exactly the axes along which tokens are split and its parameter is whole. A version
of the table with one wrong cell trains without an error; tests/test_museum_hybrid.py holds such versions.

Cost: --explain prints the bytes that a step sends along each axis. Memory: weights, gradients and states are
divided over pp and tp, and for experts over ep; activations over sp and tp, and over dp and ep, which split
the batch.

    python hybrid_5d.py --nproc 8 --pp 2 --dp 2 --tp 2 --explain
    torchrun --nproc_per_node=8 hybrid_5d.py --pp 2 --sp 2 --ep 2
    mpirun -np 8 python hybrid_5d.py --dp 2 --ep 2 --tp 2 --sequence-parallel
    torchrun --nproc_per_node=32 hybrid_5d.py --pp 2 --dp 2 --ep 2 --sp 2 --tp 2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

from torch import Tensor

from common.comm.placement import TOKEN_AXES, clip_gradients, sum_tied_gradients
from common.launch.runtime import Runtime
from common.lesson.job import Job, total
from common.lesson.runner import run

from dp_zero import Zero
from ep_moe import expert_parallel
from hybrid_experts import split
from hybrid_initial import from_seed, materialise
from hybrid_layout import HybridOptions
from hybrid_model import between_stages, gradient_groups, make_groups, ring_kernel
from hybrid_training import lesson
from pp_pipeline import Pipeline
from pp_schedules import make_schedule
from sp_sequence_parallel import ORDERS, sequence_parallel, split_sequence
from tp_megatron import tensor_parallel


def train(job: Job[HybridOptions]) -> Iterator[Tensor]:
    """Train on all five axes; yield the loss of each global batch."""
    model, mesh, o = job.model, job.mesh, job.options  # a plain model on "meta": shapes, no values
    region = tensor_parallel(model, mesh.group("tp"), o.sequence_parallel, split) if o.tp > 1 else None
    if o.sp > 1:
        sequence_parallel(model, mesh.group("sp"), o.attention, ring_kernel(job.rt.device))
    if o.ep > 1 and model.config.experts:
        expert_parallel(model, mesh.group("ep"))
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
    for batch in job.batches():  # samples of this rank's place along dp and ep
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


def main(rt: Runtime, o: HybridOptions) -> bool:
    """Compare five dimensions with one device; with --benchmark only time them."""
    return lesson(rt, o, train)


if __name__ == "__main__":
    run(main, HybridOptions)
