"""Zero bubble: a backward pass in two halves, one of which fills the bubble (Qi et al., arXiv:2401.10241).

y = x w^T      I:  dx = dy w    the stage before waits for it      W:  dw = dy^T x    the optimizer needs it

zb-h1, p = 3    rank 0   0 1 2 . . a A 3 b B c C d D      a small letter is I, a capital one W
                rank 1   . 0 1 . a 2 b A 3 c B d C D
                rank 2   . . 0 a 1 b 2 c A 3 d B C D

zb-h1   1F1B in which rank r defers W by r micro-batches: every rank holds p, as 1F1B's first rank does.
        Each rank idles (p-1)(F + I - W), if W <= I: a third of 1F1B's (p-1)(F + I + W) if the three are
        equal.
zb-v    two chunks per rank, in a V: rank 0 has the first stage and the last, so that backward begins where
        forward ends. Each rank holds 2p chunks of half the size, as much as 1F1B's first rank, and idles p-1
        forwards of a chunk, while the pipeline fills, if F = I = W and M >= 2p - 1.

    python pp_zero_bubble.py --nproc 4      torchrun --nproc_per_node=4 pp_zero_bubble.py
    mpirun -np 4 python pp_zero_bubble.py

p ranks, r one of them  M micro-batches  F, I, W times of a forward and of the two halves of a backward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, cast

from pp_1f1b import ONE_F_ONE_B
from pp_kind import Kind
from pp_schedule import Instruction, Op

if TYPE_CHECKING:
    from torch import Tensor

    from common.launch.runtime import Runtime
    from common.lesson.job import Job

    from pp_training import PipelineOptions


def zb_h1(stages: tuple[int, ...], ranks: int, micro_batches: int, times: int = 1) -> Iterator[Instruction]:
    """Yield the compute instructions of the rank with these stages, in order.

    times: multiple of zb-h1's forwards ahead, and of its deferral of W; 2 gives the paper's ZB-H2.
    """
    (rank,) = stages  # one stage per rank, of the same number
    ahead = min(times * (ranks - 1 - rank), micro_batches)
    late = ahead + min(times * rank, micro_batches)
    for m in range(micro_batches + late):
        if m < micro_batches:
            yield Instruction("F", rank, m)
        if ahead <= m < micro_batches + ahead:
            yield Instruction("I", rank, m - ahead)
        if m >= late:
            yield Instruction("W", rank, m - late)


def zb_v(stages: tuple[int, ...], ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield the compute instructions of the rank with these stages, in order. 0 is its stage down the V, 1 up."""
    rank, after = stages[0], ranks - stages[0]
    enough = max(micro_batches, 2 * ranks - 1)  # with fewer, the missing ones leave gaps
    phases = [
        (2 * after - 1, "F0"),
        (rank, "F1 F0"),
        (after, "F1 I1 W1"),
        (enough - ranks, "F0 I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (after, "I0 W0"),
        (rank, "W1 W0"),
    ]
    count = Counter[str]()
    for times, work in phases:
        for what in work.split() * times:
            if count[what] < micro_batches:
                yield Instruction(cast(Op, what[0]), stages[int(what[1])], count[what])
            count[what] += 1


ZB_H1 = Kind(
    "zb-h1",
    zb_h1,
    bubble=lambda p, M, v: Fraction(p - 1, 3 * M + p - 1) if p <= M else None,
    holds=lambda r, p, M, v: min(M, p),
)
ZB_V = Kind(
    "zb-v",
    zb_v,
    bubble=lambda p, M, v: Fraction(p - 1, 6 * M + p - 1) if 2 * p - 1 <= M else None,
    holds=lambda r, p, M, v: 2 * p if 2 * p - 1 <= M else None,
    layout=lambda p, v: (*range(p), *reversed(range(p))),  # the V
    chunks=2,
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
    """Prove zb-h1 and zb-v equal to one device; print bubble and memory beside 1F1B's."""
    from pp_training import lesson

    return lesson(rt, o, train, [ZB_H1, ZB_V, ONE_F_ONE_B])


if __name__ == "__main__":
    from common.lesson.runner import run

    from pp_training import InOrderOptions

    run(main, InOrderOptions)
