"""Simulation of a schedule, for given times of a forward, of the halves of a backward, and of a message.

    simulate(schedule, Times(forward=1, input=1, weights=1), message=0).bubble       # Fraction(3, 11)

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


@dataclass(frozen=True)
class Times:
    """Time of each kind of computation, the same in every stage. B takes the time of both halves."""

    forward: Time = 1
    input: Time = 1
    weights: Time = 1

    def __call__(self, i: Instruction) -> Time:
        """Return the time of one computation."""
        both = self.input + self.weights
        return {"F": self.forward, "B": both, "I": self.input, "W": self.weights}[i.op]


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


EQUAL = Times(Fraction(1), Fraction(1), Fraction(1))


def simulate(schedule: Schedule, takes: Callable[[Instruction], Time] = EQUAL, message: Time = 0) -> Timeline:
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
