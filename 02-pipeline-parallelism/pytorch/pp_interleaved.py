"""Interleaved 1F1B: v chunks of layers a rank, so that the pipeline fills v times faster (arXiv:2104.04473).

    p = 2 ranks, v = 2 chunks: rank 0 has stages 0 and 2, rank 1 has stages 1 and 3

    bubble   (p-1) / (v M + p-1) of the time: v times less than 1F1B's
    holds    more: rank 0 runs 2(p-1) + (v-1)p forwards of chunks ahead, each 1/v of a stage
    sends    v times as many messages

Micro-batches go in groups of p: a rank passes a group through its first chunk, then through the next, ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pp_schedule import Instruction

if TYPE_CHECKING:
    from pp_training import PipelineOptions

    from common.runtime import Runtime


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int = 2) -> Iterator[Instruction]:
    """What `rank` computes."""
    groups = cut(range(micro_batches), max(1, micro_batches // ranks))
    order = [(chunk, m) for group in groups for chunk in range(chunks) for m in group]
    forward = [Instruction("F", chunk * ranks + rank, m) for chunk, m in order]
    order = [(chunk, m) for group in groups for chunk in reversed(range(chunks)) for m in group]
    backward = [Instruction("B", chunk * ranks + rank, m) for chunk, m in order]
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[0]), len(forward))
    for i in range(len(forward) + ahead):
        if i < len(forward):
            yield forward[i]
        if i >= ahead:
            yield backward[i - ahead]


def cut(numbers: range, parts: int) -> list[range]:
    """Consecutive parts, the longer ones first."""
    ends = [-(-i * len(numbers) // parts) for i in range(parts + 1)]
    return [numbers[a:b] for a, b in itertools.pairwise(ends)]


def main(rt: Runtime, o: PipelineOptions) -> bool:
    """Equal to one device; what it waits and holds, beside the schedule before it."""
    from pp_training import lesson  # with it comes torch, which the schedule does not need

    return lesson(rt, o, "interleaved", "1f1b")


if __name__ == "__main__":
    from pp_training import PipelineOptions

    from common.lesson import run

    run(main, PipelineOptions)
