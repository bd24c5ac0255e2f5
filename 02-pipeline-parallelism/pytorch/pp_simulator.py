"""Simulation of a schedule, for given times of a forward, of the halves of a backward, and of a message.

    simulate(schedule).bubble                                           # Fraction(3, 11)
    simulate(schedule, lambda i: 3 if i.op == "B" else 1, message=2)    # other times

A computation starts when its rank is free and its inputs are there. A message arrives `message` after its
tensor was computed, and slows nothing down. With integers or fractions all times are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from pp_schedule import COMPUTE, Instruction, Schedule

Time = Fraction | float


class Event(NamedTuple):
    """Computation with its rank, start and end."""

    rank: int
    instruction: Instruction
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """Computations of `ranks` ranks, simulated or measured."""

    ranks: int
    events: tuple[Event, ...]

    @property
    def length(self) -> Time:
        """Time from the first start to the last end."""
        return max(e.end for e in self.events) - min(e.start for e in self.events)

    @property
    def bubble(self) -> Time:
        """Share of all ranks' time in which they compute nothing."""
        return 1 - sum(e.end - e.start for e in self.events) / (self.ranks * self.length)


def equal(i: Instruction) -> Time:
    """Return 1 for a forward and for each half of a backward, 2 for a whole backward."""
    return Fraction(2 if i.op == "B" else 1)


def simulate(schedule: Schedule, takes: Callable[[Instruction], Time] = equal, message: Time = 0) -> Timeline:
    """Return the timeline of a schedule.

    takes(i): the time of a computation. message: the time of a message. Raises ValueError for a schedule that
    hangs; `check` says where.
    """
    ends: dict[Instruction, Time] = {}
    free: list[Time] = [Fraction(0)] * schedule.ranks
    waiting = [[i for i in instructions if i.op in COMPUTE][::-1] for instructions in schedule.lists]
    events: list[Event] = []
    while any(waiting):
        before = len(events)
        for rank, left in enumerate(waiting):
            while left and ((source := schedule.reads(left[-1])) is None or source in ends):
                i = left.pop()
                there = ends[source] + (message if schedule.needs(i) else 0) if source else Fraction(0)
                start = max(free[rank], there)
                free[rank] = ends[i] = start + takes(i)
                events.append(Event(rank, i, start, ends[i]))
        if len(events) == before:
            raise ValueError(f"{schedule.name} hangs")
    return Timeline(schedule.ranks, tuple(events))
