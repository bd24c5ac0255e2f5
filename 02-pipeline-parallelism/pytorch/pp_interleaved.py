"""Interleaved 1F1B: v chunks of layers per rank, so the pipeline fills v times faster (arXiv:2104.04473).

    p = 2 ranks, v = 2 chunks: rank 0 has stages 0 and 2, rank 1 has stages 1 and 3; M = 4, raised digits: second chunk

    rank 0   0 1 ⁰ ¹ 2 . a a 3 b b ² a a ³ b b . c c . d d c c d d
    rank 1   . 0 1 ⁰ a a ¹ b b 2 a a 3 b b ² c c ³ d d c c d d . .

    bubble   (p-1) / (v M + p-1) of the time: 1F1B's waits, each 1/v as long; for M >= p
    holds    more: 2(p-1-r) + (v-1)p + 1 chunks on rank r, each 1/v of a stage; if p divides M
    sends    v times as many messages

Micro-batches are processed in groups of p: a rank runs a group through its first chunk, then through the
next, ... If p does not divide M, groups are longer; with fewer than p micro-batches there is one group, and a
longer bubble.

    python pp_interleaved.py --nproc 4      torchrun --nproc_per_node=4 pp_interleaved.py
    mpirun -np 4 python pp_interleaved.py

r a rank; digits are forwards, two letters are a backward, a dot is bubble
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from pp_1f1b import ONE_F_ONE_B
from pp_kind import Kind
from pp_schedule import Instruction

if TYPE_CHECKING:
    from torch import Tensor

    from common.launch.runtime import Runtime
    from common.lesson.job import Job

    from pp_training import PipelineOptions


def interleaved(stages: tuple[int, ...], ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield the compute instructions of the rank with these stages, in order."""
    rank, chunks = stages[0], len(stages)
    count = max(1, micro_batches // ranks)
    groups = [
        range(micro_batches)[g * micro_batches // count : (g + 1) * micro_batches // count]
        for g in range(count)
    ]
    longest = max(map(len, groups))
    forward = [Instruction("F", stage, m) for group in groups for stage in stages for m in group]
    backward = [Instruction("B", stage, m) for group in groups for stage in reversed(stages) for m in group]
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * longest, len(forward))
    for i in range(len(forward) + ahead):
        if i < len(forward):
            yield forward[i]
        if i >= ahead:
            yield backward[i - ahead]


def held(rank: int, ranks: int, micro_batches: int, chunks: int) -> int | None:
    """Return the chunks of micro-batches that a rank holds at once; None if p does not divide M, or for few M."""
    ahead = 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
    return ahead + 1 if micro_batches % ranks == 0 and ahead < chunks * micro_batches else None


INTERLEAVED = Kind(
    "interleaved",
    interleaved,
    bubble=lambda p, M, v: Fraction(p - 1, v * M + p - 1) if p <= M else None,
    holds=held,
    chunks=0,
)


def train(job: Job[PipelineOptions], kind: Kind) -> Iterator[Tensor]:
    """Train by a schedule of this kind; yield the loss of each batch."""
    from pp_training import pipeline  # imports torch, which the schedule does not need

    o = job.options
    schedule = kind.schedule(job.group.size, o.micro_batches, o.chunks)  # all ranks' lists, with messages
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
    """Prove equality with one device; print bubble and memory beside 1F1B's."""
    from pp_training import lesson

    return lesson(rt, o, train, [INTERLEAVED, ONE_F_ONE_B])


if __name__ == "__main__":
    from common.lesson.runner import run

    from pp_training import PipelineOptions

    run(main, PipelineOptions)
