"""Schedules that a reader wrote: read, proved and simulated, with messages that name the slot of a mistake.

A slot is a place in the list of one rank, from 0. An answer is a generator of tuples (op, stage, micro-batch); the
targets of the chapter's exercises call these functions. Each raises Wrong.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from common.grade.targets import Wrong

from pp_checker import ScheduleError, check, computations
from pp_schedule import COMPUTE, Instruction, Schedule, connect, other_end
from pp_simulator import Time, Timeline, simulate

HOLDS = {"F": 1, "B": -1, "W": -1}


@dataclass(frozen=True)
class Answer:
    """Lists as the reader wrote them, and the schedule that they make, which the checker has proved."""

    lists: list[list[Instruction]]
    schedule: Schedule

    def __str__(self) -> str:
        """Return the numbers of ranks, micro-batches and, if there are several, chunks."""
        s = self.schedule
        chunks = f", {s.stages // s.ranks} chunks per rank" if s.stages > s.ranks else ""
        return f"ranks {s.ranks}, micro-batches {s.micro_batches}{chunks}"


def answer(
    generate: Callable[[int], Iterable[object]],
    micro_batches: int,
    owner: Sequence[int],
    ops: Sequence[str] = ("F", "B"),
) -> Answer:
    """Return the answer of which `generate(rank)` yields each rank's list.

    owner: the rank of each stage. ops: those that an answer may yield; if none of them is a message, `connect` adds
    the messages.
    """
    most = 6 * len(owner) * micro_batches
    lists = [
        read(rank, itertools.islice(generate(rank), most + 1), owner, ops, most)
        for rank in range(max(owner) + 1)
    ]
    plan = Answer(lists, Schedule("answer", micro_batches, tuple(owner), tuple(map(tuple, lists))))
    try:
        if set(ops) <= set(COMPUTE):
            computations(plan.schedule)
            plan = Answer(lists, connect("answer", micro_batches, owner, lists))
        check(plan.schedule)
    except ScheduleError as error:
        raise Wrong(f"{plan}: {with_slots(str(error), lists)}") from None
    return plan


def read(
    rank: int, items: Iterable[object], owner: Sequence[int], ops: Sequence[str], most: int
) -> list[Instruction]:
    """Return the instructions of a rank's list."""
    found: list[Instruction] = []
    for slot, item in enumerate(items):
        if slot == most:
            raise Wrong(f"rank {rank} yields more than {most} instructions: does its generator end?")
        match item:
            case (str(op), int(stage), int(micro)) if op in ops:
                i = Instruction(op, stage, micro)  # type: ignore[arg-type]
            case _:
                raise Wrong(
                    f"rank {rank}, slot {slot}: {item!r} is no instruction; (op, stage, micro-batch) is needed, "
                    f"with op one of {', '.join(ops)}"
                )
        if stage not in range(len(owner)) or owner[stage] != rank:
            mine = ", ".join(str(s) for s, of in enumerate(owner) if of == rank)
            raise Wrong(
                f"rank {rank}, slot {slot}: '{i}' is for stage {stage}; of {len(owner)} stages this rank has {mine}"
            )
        if op not in COMPUTE and (other := other_end(i).stage) not in range(len(owner)):
            raise Wrong(
                f"rank {rank}, slot {slot}: the other end of '{i}' would be stage {other}, and there is none; "
                f"the stages are 0 to {len(owner) - 1}"
            )
        found.append(i)
    return found


def with_slots(message: str, lists: list[list[Instruction]]) -> str:
    """Return a message of the checker with the slots of the instructions that it names."""
    slots = {str(i): f" (rank {rank}, slot {k})" for rank, row in enumerate(lists) for k, i in enumerate(row)}
    placed = re.sub(r"'(\w+ \d+ \d+)'", lambda found: found[0] + slots.get(found[1], ""), message)
    if which := re.match(r"rank (\d+), stage (\d+), micro-batch (\d+)", message):
        rank, *about = map(int, which.groups())
        named = [
            f"slot {k} is '{i}'"
            for k, i in enumerate(lists[rank])
            if i.op in COMPUTE and [i.stage, i.micro] == about
        ]
        placed = "; ".join([placed, *named])
    return placed


def holds_at_most(plan: Answer, most: Callable[[int], int], unit: str = "micro-batches") -> None:
    """Check that each rank r holds at most `most(r)` micro-batches, or chunks of these, at once."""
    for rank, row in enumerate(plan.lists):
        held = list(itertools.accumulate(HOLDS.get(i.op, 0) for i in row))
        if max(held) > most(rank):
            slot = next(k for k, n in enumerate(held) if n > most(rank))
            raise Wrong(
                f"{plan}: after slot {slot} of rank {rank}, '{row[slot]}', this rank holds {held[slot]} {unit}; "
                f"at most {most(rank)} are allowed"
            )


def bubble_at_most(plan: Answer, right: Schedule, backward: int = 2, message: Fraction | int = 0) -> None:
    """Check that the bubble is that of the right schedule, or shorter; if not, name the first wait that is not its.

    backward, message: times of a backward and of a message, in units of a forward. I takes 1 unit.
    """
    takes = {"F": 1, "B": backward, "I": 1, "W": backward - 1}
    got, want = (simulate(s, lambda i: Fraction(takes[i.op]), message) for s in (plan.schedule, right))
    if got.length <= want.length:
        return
    allowed = {wait[:3] for wait in waits(want)}
    where = ""
    if extra := [wait for wait in sorted(waits(got)) if wait[:3] not in allowed]:
        start, end, rank, i = extra[0]
        where = (
            f"; rank {rank} waits from {start} to {end} before its slot {plan.lists[rank].index(i)}, '{i}'"
        )
    times = f", a message takes {message}" if message else f", a backward takes {backward}" * (backward != 2)
    raise Wrong(
        f"{plan}{times}: the bubble is {got.bubble} of the time ({got.length} units), exactly {want.bubble} "
        f"({want.length} units) is needed{where}"
    )


def waits(line: Timeline) -> list[tuple[Time, Time, int, Instruction]]:
    """Return (start, end, rank, the computation that ends the wait) of all waits of a timeline."""
    found = []
    for rank in range(line.ranks):
        free: Time = Fraction(0)
        for event in (e for e in line.events if e.rank == rank):
            if event.start > free:
                found.append((free, event.start, rank, event.instruction))
            free = event.end
    return found
