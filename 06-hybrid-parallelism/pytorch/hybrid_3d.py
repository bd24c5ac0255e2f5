"""Three dimensions: pipeline, data and tensor parallelism, the layout of most large dense models.

    8 ranks, --pp 2 --dp 2 --tp 2                                          rank = (p * dp + d) * tp + t

              first layers                    last layers
    d = 0     [ 0 --tp-- 1 ]  --activations-> [ 4 --tp-- 5 ]               samples 0 to 3
                |        |                      |        |
              gradients  |                    gradients  |
                |        |                      |        |
    d = 1     [ 2 --tp-- 3 ]  --activations-> [ 6 --tp-- 7 ]               samples 4 to 7

tp communicates most, several times per layer, so its ranks are neighbours and share a host. pp communicates
least, one message per micro-batch, and may cross hosts. dp sums gradients once per step, and the backward
pass can hide that sum. (Narayanan et al., "Efficient large-scale language model training on GPU clusters
using Megatron-LM", arXiv:2104.04473, section 3.)

    python hybrid_3d.py --nproc 8 --pp 2 --tp 2                 mpirun -np 4 python hybrid_3d.py --pp 2 --tp 2
    torchrun --nproc_per_node=8 hybrid_3d.py --pp 2 --tp 2 --zero 1 --schedule zb-h1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from common.comm.placement import TOKEN_AXES, clip_gradients, sum_tied_gradients
from common.launch.runtime import Runtime
from common.lesson.job import Job, total
from common.lesson.runner import run

from dp_zero import Zero
from hybrid_experts import split
from hybrid_initial import from_seed, materialise
from hybrid_layout import HybridOptions
from hybrid_model import between_stages, gradient_groups, make_groups
from hybrid_training import lesson
from pp_pipeline import Pipeline
from pp_schedules import make_schedule
from tp_megatron import tensor_parallel


@dataclass
class Options(HybridOptions, without=("ep", "sp", "attention")):
    """Options: a dense model on pp, dp and tp."""

    model: str = "llama-tiny"
    """Name of a model in common/models/configs.py."""


def train(job: Job[Options]) -> Iterator[Tensor]:
    """Train on pp, dp and tp; yield the loss of each global batch."""
    model, mesh, o = job.model, job.mesh, job.options  # a plain model on "meta": shapes, no values
    region = tensor_parallel(model, mesh.group("tp"), o.sequence_parallel, split) if o.tp > 1 else None
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
    for batch in job.batches():  # samples of this rank's place along dp
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
    """Compare three dimensions with one device; with --benchmark only time them."""
    return lesson(rt, o, train)


if __name__ == "__main__":
    run(main, Options)
