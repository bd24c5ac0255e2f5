"""Interleaved 1F1B: the forwards and the backwards in their orders, merged one by one."""

from collections.abc import Iterator

Instruction = tuple[str, int, int]


def interleaved(rank: int, ranks: int, chunks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield what this rank computes."""
    stages = [rank + ranks * chunk for chunk in range(chunks)]
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    forward = [("F", stage, m) for group in groups for stage in stages for m in group]
    backward = [("B", stage, m) for group in groups for stage in reversed(stages) for m in group]
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, len(forward))
    yield from forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        yield f
        yield b
    yield from backward[len(forward) - ahead :]
