"""1F1B: each backward as soon as it can run, so that few micro-batches are held (PipeDream, arXiv:1806.03377).

    rank 0   0 1 2 3 . . . . . . a a . b b . c c . d d      rank r fills the pipeline with p-1-r forwards, then does
    rank 1   . 0 1 2 . . . . a a 3 b b . c c . d d . .      one forward, one backward, ... and drains it
    rank 2   . . 0 1 . . a a 2 b b 3 c c . d d . . . .
    rank 3   . . . 0 a a 1 b b 2 c c 3 d d . . . . . .

    bubble   (p-1) / (M + p-1) of the time, as GPipe's
    holds    at most p - r micro-batches on rank r, for any M: the difference from GPipe

The bubble is that of GPipe. But each backward runs earlier, so ranks hold fewer micro-batches.

    python pp_1f1b.py --nproc 4      torchrun --nproc_per_node=4 pp_1f1b.py      mpirun -np 4 python pp_1f1b.py

p ranks, r one of them  M micro-batches; a digit is a forward, two letters are a backward, a dot is bubble
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from pp_gpipe import GPIPE
from pp_kind import Kind
from pp_schedule import Instruction

if TYPE_CHECKING:
    from torch import Tensor

    from common.launch.runtime import Runtime
    from common.lesson.job import Job

    from pp_training import PipelineOptions


def one_f_one_b(stages: tuple[int, ...], ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield the compute instructions of the rank with these stages, in order."""
    (rank,) = stages  # one stage per rank, of the same number
    ahead = min(ranks - 1 - rank, micro_batches)  # forwards before the first backward can run
    for m in range(micro_batches + ahead):
        if m < micro_batches:
            yield Instruction("F", rank, m)
        if m >= ahead:
            yield Instruction("B", rank, m - ahead)


ONE_F_ONE_B = Kind(
    "1f1b",
    one_f_one_b,
    bubble=lambda p, M, v: Fraction(p - 1, M + p - 1),
    holds=lambda r, p, M, v: min(M, p - r),
)


def train(job: Job[PipelineOptions], kind: Kind) -> Iterator[Tensor]:
    """Train by a schedule of this kind; yield the loss of each batch."""
    from pp_training import pipeline  # imports torch, which the schedule does not need

    schedule = kind.schedule(job.group.size, job.options.micro_batches)  # all ranks' lists, with messages
    pipe = pipeline(job, schedule)  # a Pipeline; job.model keeps the layers of this rank's stages
    optimizer = job.optimizer(job.model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # the same on all ranks
        count = batch.count_targets()
        optimizer.zero_grad()
        loss_sum = pipe.run(batch.parts, 1 / count, batch.begin)  # forwards and backwards, by the list
        pipe.finish()  # sum a tied head's gradient over the two ranks that hold it
        optimizer.step()
        yield loss_sum / count


def main(rt: Runtime, o: PipelineOptions) -> bool:
    """Prove equality with one device; print bubble and memory beside GPipe's."""
    from pp_training import lesson

    return lesson(rt, o, train, [ONE_F_ONE_B, GPIPE])


if __name__ == "__main__":
    from common.lesson.runner import run

    from pp_training import InOrderOptions

    run(main, InOrderOptions)
