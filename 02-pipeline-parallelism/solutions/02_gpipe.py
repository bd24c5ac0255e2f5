"""GPipe: every forward between its messages, then every backward between its own."""

from collections.abc import Iterator

Instruction = tuple[str, int, int]


def gpipe(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield what this rank does."""
    is_first, is_last = rank == 0, rank == ranks - 1
    for m in range(micro_batches):
        if not is_first:
            yield "RX", rank, m
        yield "F", rank, m
        if not is_last:
            yield "SX", rank, m
    for m in range(micro_batches):
        if not is_last:
            yield "RG", rank, m
        yield "B", rank, m
        if not is_first:
            yield "SG", rank, m
