"""1F1B: each backward as soon as it can run, so that few micro-batches are held (Narayanan et al., arXiv:2104.04473).

    rank 0   0 1 2 3 . . . . . . a a . b b . c c . d d      rank r fills the pipeline with p-1-r forwards, then does
    rank 1   . 0 1 2 . . . . a a 3 b b . c c . d d . .      one forward, one backward, ... and drains it
    rank 2   . . 0 1 . . a a 2 b b 3 c c . d d . . . .
    rank 3   . . . 0 a a 1 b b 2 c c 3 d d . . . . . .

    bubble   (p-1) / (M + p-1) of the time, as GPipe's
    holds    p - r micro-batches on rank r, however large M is: the difference from GPipe

As many places are empty as in GPipe. What changes is how early a backward comes, and with it the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pp_schedule import Instruction

if TYPE_CHECKING:
    from pp_training import PipelineOptions

    from common.runtime import Runtime


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """What `rank` computes."""
    ahead = min(ranks - 1 - rank, micro_batches)  # forwards before the first backward can be here
    for m in range(micro_batches + ahead):
        if m < micro_batches:
            yield Instruction("F", rank, m)
        if m >= ahead:
            yield Instruction("B", rank, m - ahead)


def main(rt: Runtime, o: PipelineOptions) -> bool:
    """Equal to one device; what it waits and holds, beside GPipe."""
    from pp_training import lesson  # with it comes torch, which the schedule does not need

    return lesson(rt, o, "1f1b", "gpipe")


if __name__ == "__main__":
    from pp_training import InOrderOptions

    from common.lesson import run

    run(main, InOrderOptions)
