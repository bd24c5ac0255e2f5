"""1F1B: each backward as soon as it can run, so that few micro-batches are held (Narayanan et al., arXiv:2104.04473).

rank 0   0 1 2 3 . . . . . . a a . . b b . . c c . . d d ...   M = 4, p = 4
rank r fills the pipeline with p-1-r forwards, then does one forward, one backward, ... and drains it

bubble   (p-1) / (M + p-1) of the time, as GPipe's
holds    p - r micro-batches on rank r, however large M is: the difference from GPipe
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
    """Equal to one device; what it waits and holds, beside the schedule before it."""
    from pp_training import lesson  # with it comes torch, which the schedule does not need

    return lesson(rt, o, "1f1b", "gpipe")


if __name__ == "__main__":
    from pp_training import PipelineOptions

    from common.lesson import run

    run(main, PipelineOptions)
