"""All schedules by name: the stages of each rank, the generator of the lists, the bubble by formula.

    python pp_schedules.py --schedule 1f1b --ranks 4 --micro-batches 8        prints the lists, one line a rank

p ranks, M micro-batches, v chunks per rank; bubbles if forward, I and W take the same time and messages none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Literal

from common.errors import UsageError
from common.launch.command_line import Checked, Ranks, Within, parse
from common.launch.program import run_program

from pp_1f1b import one_f_one_b
from pp_checker import check
from pp_gpipe import gpipe
from pp_interleaved import interleaved
from pp_schedule import Generator, Schedule, connect, in_a_line, in_a_v
from pp_zero_bubble import zb_h1, zb_v


@dataclass(frozen=True)
class Kind:
    """Kind of schedule.

    owner(p, v): the rank of each stage. generator: yields what one rank computes. bubble(p, M, v): for at
    least `enough`(p) micro-batches. chunks: per rank; 0 for any number.
    """

    owner: Callable[[int, int], Sequence[int]]
    generator: Generator
    bubble: Callable[[int, int, int], Fraction]
    enough: Callable[[int], int] = lambda p: 1
    chunks: int = 1


def in_order(p: int, M: int, v: int) -> Fraction:
    """Return (p-1) / (v M + p-1): a rank idles for p-1 of v M + p-1 slots (Huang et al., arXiv:1811.06965).

    A slot is the time of a chunk's forward and backward.
    """
    return Fraction(p - 1, v * M + p - 1)


KINDS = {
    "gpipe": Kind(in_a_line, gpipe, in_order),
    "1f1b": Kind(in_a_line, one_f_one_b, in_order),
    "interleaved": Kind(in_a_line, interleaved, in_order, enough=lambda p: p, chunks=0),
    "zb-h1": Kind(in_a_line, zb_h1, lambda p, M, v: Fraction(p - 1, 3 * M + p - 1), enough=lambda p: p),
    "zb-v": Kind(
        lambda p, v: in_a_v(p), zb_v, lambda p, M, v: Fraction(p - 1, 6 * M + p - 1), lambda p: 2 * p - 1, 2
    ),
}


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Return a schedule that the checker has proved. chunks: per rank, where the kind leaves the number open.

    Raises ValueError for an unknown name, and for sizes below 1.
    """
    if name not in KINDS:
        raise ValueError(f"schedule {name!r} is unknown; choose one of {', '.join(KINDS)}")
    if min(ranks, micro_batches, chunks) < 1:
        raise ValueError(
            f"{ranks} ranks, {micro_batches} micro-batches, {chunks} chunks: each must be at least 1"
        )
    kind = KINDS[name]
    generator = kind.generator if kind.chunks else partial(interleaved, chunks=chunks)
    computed = [tuple(generator(rank, ranks, micro_batches)) for rank in range(ranks)]
    schedule = connect(name, micro_batches, kind.owner(ranks, kind.chunks or chunks), computed)
    check(schedule)
    return schedule


def bubble(name: str, ranks: int, micro_batches: int, chunks: int = 2) -> Fraction | None:
    """Return the bubble by formula for F = I = W and instant messages; None for too few micro-batches."""
    kind = KINDS[name]
    return (
        kind.bubble(ranks, micro_batches, kind.chunks or chunks)
        if micro_batches >= kind.enough(ranks)
        else None
    )


LONGEST = 2**20  # computations; more take minutes to check


@dataclass
class PrintOptions(Checked):
    """Options: the schedule to print."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    ranks: Ranks = 4
    micro_batches: Annotated[int, Within(1, LONGEST)] = 8
    chunks: Annotated[int, Within(1, 1000)] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks * self.micro_batches * self.chunks > LONGEST:
            raise UsageError(
                f"--ranks {self.ranks} --micro-batches {self.micro_batches} --chunks {self.chunks}: give numbers whose "
                f"product is at most {LONGEST}"
            )


def main() -> int:
    """Print a schedule; return the exit status."""
    o = parse(PrintOptions, __doc__)
    print(make_schedule(o.schedule, o.ranks, o.micro_batches, o.chunks))
    return 0


if __name__ == "__main__":
    run_program(main)
