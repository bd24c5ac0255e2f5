"""Kind of schedule: which stages a rank has, what it computes in which order, and its bubble by formula.

    ONE_F_ONE_B = Kind("1f1b", one_f_one_b, bubble=lambda p, M, v: Fraction(p - 1, M + p - 1))
    schedule = ONE_F_ONE_B.schedule(4, 8)         # of 4 ranks and 8 micro-batches, with messages, checked

p ranks, M micro-batches, v stages (chunks) per rank; bubbles if forward, I and W take the same time and messages none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from pp_checker import check
from pp_schedule import Instruction, Schedule, connect

Generator = Callable[
    [tuple[int, ...], int, int], Iterator[Instruction]
]  # a rank's stages, ranks, micro-batches


@dataclass(frozen=True)
class Kind:
    """Kind of schedule.

    generator: yields what the rank with these stages computes. bubble(p, M, v): its share of the time, by formula.
    holds(r, p, M, v): the chunks of micro-batches that rank r holds at once, by formula. Both are None for too few
    micro-batches. layout(p, v): the rank of each stage. chunks: stages per rank; 0 for any number.
    """

    name: str
    generator: Generator
    bubble: Callable[[int, int, int], Fraction | None]
    holds: Callable[[int, int, int, int], int | None]
    layout: Callable[[int, int], tuple[int, ...]] = lambda p, v: (*range(p),) * v
    chunks: int = 1

    def owner(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """Return the rank of each stage. chunks: per rank, where the kind leaves the number open."""
        return self.layout(ranks, self.chunks or chunks)

    def schedule(self, ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
        """Return a schedule that the checker has proved. Raises ValueError for sizes below 1."""
        if min(ranks, micro_batches, chunks) < 1:
            raise ValueError(
                f"{ranks} ranks, {micro_batches} micro-batches, {chunks} chunks: each must be at least 1"
            )
        owner = self.owner(ranks, chunks)
        mine = [tuple(stage for stage, of in enumerate(owner) if of == rank) for rank in range(ranks)]
        computed = [tuple(self.generator(stages, ranks, micro_batches)) for stages in mine]
        schedule = connect(self.name, micro_batches, owner, computed)
        check(schedule)
        return schedule
