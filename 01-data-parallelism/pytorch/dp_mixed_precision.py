"""Mixed precision: multiply in 16 bits; keep the weights, the sums over ranks and the optimizer in 32.

                 bits of precision   largest    smallest
    float32      24                  3e38       1e-45
    bfloat16      8                  3e38       1e-40     float32 with the last 16 bits cut off
    float16      11                  65504      6e-8      gradients may vanish: dp_loss_scaling.py

    weights      float32 ── cast ── 16 bits ─┐
    activations                     16 bits ─┴─ product ── 16 bits ── loss: float32
    gradients    float32 ── cast ── 16 bits ─── backward ──────────────┘
    all-reduce, optimizer: float32

Versions: bfloat16 by autocast on the data parallelism of dp_basic.py, and on torch's DDP.

Each rank rounds its part of a gradient before the parts are summed; one device rounds the whole gradient. So
we prove:
    - the first gradients equal those of one device that splits its batch as the ranks do: 1e-5, as in float32
    - the run equals that of one device, in bfloat16 and in float32, up to 32 roundings of 2^-8

Cost: the bytes of float32, since gradients are float32. Memory: a layer's activations shrink to about 5/8,
but a 16-bit copy of the weights is kept from the forward to the backward pass, so memory is saved only from
some hundred tokens on. Micikevicius et al., "Mixed precision training" (arXiv:1710.03740).

    python dp_mixed_precision.py --nproc 4          torchrun --nproc_per_node=4 dp_mixed_precision.py
    mpirun -np 4 python dp_mixed_precision.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

import dp_basic
from dp_basic import DataParallel
from dp_costs import basic_start, basic_step
from dp_precision_proof import PrecisionOptions, in_precision, prove_precision
from dp_training import check


def train(job: Job[PrecisionOptions]) -> Iterator[Tensor]:
    """Train with products in bfloat16, the rest in float32; yield the loss of each global batch."""
    model, group = job.model, job.group
    dp = DataParallel(model, group, job.options.bucket_mb)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with dp.no_sync() if i < len(batch) else nullcontext():
                with torch.autocast(tokens_BS.device.type, torch.bfloat16):
                    logits_BSV = model(tokens_BS)  # casts inputs and weights of products, and keeps the casts
                loss_sum, _ = cross_entropy_sum(logits_BSV, targets_BS)
                loss = loss_sum / count
                loss.backward()  # in the precisions of the forward pass
            losses.append(loss.detach())
        dp.finish()
        optimizer.step()
        yield total(losses, group)


def train_ddp(job: Job[PrecisionOptions]) -> Iterator[Tensor]:
    """Train likewise with torch's DDP."""
    in_precision(job.model, torch.bfloat16)
    return dp_basic.train_ddp(job)


VERSIONS = {"bucketed": train, "ddp": train_ddp}
LESSON = Lesson("dp", VERSIONS, basic_step, start_bytes=basic_start, unseen=("ddp",))


def main(rt: Runtime, o: PrecisionOptions) -> bool:
    """Check the options, and prove equality of the versions with one device."""
    check(rt, tuple(VERSIONS), o)
    return prove_precision(rt, o, LESSON)


if __name__ == "__main__":
    run(main, PrecisionOptions)
