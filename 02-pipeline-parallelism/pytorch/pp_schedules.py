"""All kinds of schedules by name. Each is defined beside its generator, in the file of its lesson.

python pp_schedules.py --schedule 1f1b --ranks 4 --micro-batches 8        prints the lists, one line a rank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from common.errors import UsageError
from common.launch.command_line import Checked, Ranks, Within, parse
from common.launch.program import run_program

from pp_1f1b import ONE_F_ONE_B
from pp_gpipe import GPIPE
from pp_interleaved import INTERLEAVED
from pp_schedule import Schedule
from pp_zero_bubble import ZB_H1, ZB_V

KINDS = {kind.name: kind for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_V)}


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Return a schedule that the checker has proved. chunks: per rank, where the kind leaves the number open.

    Raises ValueError for an unknown name, and for sizes below 1.
    """
    if name not in KINDS:
        raise ValueError(f"schedule {name!r} is unknown; choose one of {', '.join(KINDS)}")
    return KINDS[name].schedule(ranks, micro_batches, chunks)


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
