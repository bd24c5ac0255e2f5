"""1F1B: forward m and backward m - ahead alternate; rank r is p - 1 - r forwards ahead."""

from collections.abc import Iterator

Instruction = tuple[str, int, int]


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield what this rank computes."""
    ahead = ranks - 1 - rank
    for m in range(micro_batches + ahead):
        if m < micro_batches:
            yield "F", rank, m
        if m >= ahead:
            yield "B", rank, m - ahead
