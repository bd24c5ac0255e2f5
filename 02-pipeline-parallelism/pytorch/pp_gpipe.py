"""GPipe: all micro-batches forward, then all backward (Huang et al., arXiv:1811.06965).

    rank 0   0 1 2 3 . . . . . . . . . a a b b c c d d      p = 4 ranks, M = 4 micro-batches: a digit is a forward,
    rank 1   . 0 1 2 3 . . . . . . a a b b c c d d . .      two letters a backward, which takes twice the time,
    rank 2   . . 0 1 2 3 . . . a a b b c c d d . . . .      and a dot is bubble: nothing to do
    rank 3   . . . 0 1 2 3 a a b b c c d d . . . . . .

    bubble   (p-1) / (M + p-1) of the time
    holds    M micro-batches, whatever the rank

More micro-batches: less bubble, more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pp_schedule import Instruction

if TYPE_CHECKING:
    from pp_training import PipelineOptions

    from common.runtime import Runtime


def gpipe(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """What `rank` computes."""
    yield from (Instruction("F", rank, m) for m in range(micro_batches))
    yield from (Instruction("B", rank, m) for m in range(micro_batches))


def main(rt: Runtime, o: PipelineOptions) -> bool:
    """Equal to one device; what it waits and holds."""
    from pp_training import lesson  # with it comes torch, which the schedule does not need

    return lesson(rt, o, "gpipe")


if __name__ == "__main__":
    from pp_training import InOrderOptions

    from common.lesson import run

    run(main, InOrderOptions)
