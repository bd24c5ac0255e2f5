"""GPipe: all micro-batches forward, then all backward (Huang et al., arXiv:1811.06965).

    rank 0   0 1 2 3 . . . . . . . . . a a b b c c d d      p = 4 ranks, M = 4 micro-batches: a digit is a forward,
    rank 1   . 0 1 2 3 . . . . . . a a b b c c d d . .      two letters a backward, which takes twice the time,
    rank 2   . . 0 1 2 3 . . . a a b b c c d d . . . .      and a dot is bubble: nothing to do
    rank 3   . . . 0 1 2 3 a a b b c c d d . . . . . .

    bubble   (p-1) / (M + p-1) of the time
    holds    M micro-batches on every rank

More micro-batches: less bubble, more memory.

    python pp_gpipe.py --nproc 4      torchrun --nproc_per_node=4 pp_gpipe.py      mpirun -np 4 python pp_gpipe.py
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from pp_kind import Kind
from pp_schedule import Instruction

if TYPE_CHECKING:
    from torch import Tensor

    from common.launch.runtime import Runtime
    from common.lesson.job import Job

    from pp_training import PipelineOptions


def gpipe(stages: tuple[int, ...], ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield the compute instructions of the rank with these stages, in order."""
    (stage,) = stages
    yield from (Instruction("F", stage, m) for m in range(micro_batches))
    yield from (Instruction("B", stage, m) for m in range(micro_batches))


GPIPE = Kind("gpipe", gpipe, bubble=lambda p, M, v: Fraction(p - 1, M + p - 1), holds=lambda r, p, M, v: M)


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
    """Prove equality with one device; print bubble and memory."""
    from pp_training import lesson

    return lesson(rt, o, train, [GPIPE])


if __name__ == "__main__":
    from common.lesson.runner import run

    from pp_training import InOrderOptions

    run(main, InOrderOptions)
