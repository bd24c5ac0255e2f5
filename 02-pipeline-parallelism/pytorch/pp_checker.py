"""Proof that a schedule is correct, before anything runs.

    1   every micro-batch passes every stage forward once and backward once, in this order, on the stage's rank
    2   every message that a computation reads is sent once and received once, no other is
    3   both ends of a channel name its messages in the same order
    4   no rank waits for ever

`held` also counts the memory: the chunks of micro-batches that a rank holds at once.
"""

from __future__ import annotations

import itertools
from collections import Counter

from pp_schedule import COMPUTE, Channel, Instruction, Schedule, other_end


class ScheduleError(Exception):
    """Error for a schedule that would compute something wrong, or hang."""


def check(schedule: Schedule) -> None:
    """Raise ScheduleError for the first error in the schedule."""
    computations(schedule)
    messages(schedule)
    run_dry(schedule)


def computations(schedule: Schedule) -> None:
    """Check rule 1 within each rank: right numbers, right ranks, forward before backward."""
    for i in itertools.chain(*schedule.lists):
        inside = range(schedule.stages)
        if i.stage not in inside or (i.op not in COMPUTE and other_end(i).stage not in inside):
            raise ScheduleError(
                f"'{i}' needs a stage that does not exist; the stages are 0 to {schedule.stages - 1}"
            )
    for rank, instructions in enumerate(schedule.lists):
        at = {i: place for place, i in enumerate(instructions)}
        if len(at) < len(instructions):
            twice = Counter(instructions).most_common(1)[0][0]
            raise ScheduleError(f"rank {rank} has '{twice}' twice")
        for stage, m in ((s, m) for s in schedule.mine(rank) for m in range(schedule.micro_batches)):
            places = {op: at.pop(Instruction(op, stage, m), None) for op in COMPUTE}  # type: ignore[arg-type]
            found = tuple(op for op in COMPUTE if places[op] is not None)
            if found not in (("F", "B"), ("F", "I", "W")):
                raise ScheduleError(
                    f"rank {rank}, stage {stage}, micro-batch {m} has {' '.join(found) or 'nothing'}; "
                    "F B or F I W is needed"
                )
            order = [places[op] for op in found]
            if order != sorted(order):  # type: ignore[type-var]
                raise ScheduleError(
                    f"rank {rank}, stage {stage}, micro-batch {m}: not in the order {' '.join(found)}"
                )
        if left := next((i for i in at if i.op in COMPUTE), None):
            raise ScheduleError(
                f"rank {rank} has '{left}', which is another rank's"
                if left.stage not in schedule.mine(rank)
                else f"rank {rank} has '{left}'; the micro-batches are 0 to {schedule.micro_batches - 1}"
            )


def messages(schedule: Schedule) -> None:
    """Check rules 2 and 3, and that each message is sent after its tensor is computed."""
    sent: dict[Channel, list[Instruction]] = {}
    received: dict[Channel, list[Instruction]] = {}
    for rank, instructions in enumerate(schedule.lists):
        done: set[Instruction] = set()
        unsent: list[Instruction] = []
        for i in instructions:
            if i.op[0] == "S":
                if i not in unsent:
                    raise ScheduleError(f"rank {rank} sends '{i}' before it has made it")
                unsent.remove(i)
                sent.setdefault(schedule.channel(i), []).append(i)
            elif i.op[0] == "R":
                received.setdefault(schedule.channel(i), []).append(i)
            elif (message := schedule.needs(i)) and message not in done:
                raise ScheduleError(f"rank {rank} computes '{i}' and never received what it needs before")
            elif result := schedule.makes(i):
                unsent.append(result)
            done.add(i)
        if unsent:
            raise ScheduleError(f"rank {rank} never sends '{unsent[0]}'")
    for channel in sent.keys() | received.keys():
        here, there = sent.get(channel, []), [other_end(i) for i in received.get(channel, [])]
        if here != there:
            first = next(i for i in range(max(len(here), len(there))) if here[i : i + 1] != there[i : i + 1])
            raise ScheduleError(
                f"from rank {channel[0]} to {channel[1]}, message {first}: '{(*here[first:], 'nothing')[0]}' is sent, "
                f"'{(*there[first:], 'nothing')[0]}' expected"
            )


def run_dry(schedule: Schedule) -> None:
    """Check rule 4, and the rest of rule 1: every rank reaches the end of its list."""
    at = [0] * schedule.ranks
    done: set[Instruction] = set()
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(schedule.lists):
            while at[rank] < len(instructions) and done.issuperset(
                waits_for(schedule, instructions[at[rank]])
            ):
                done.add(instructions[at[rank]])
                at[rank] += 1
                moved = True
    stand = [f"rank {r} at '{i[at[r]]}'" for r, i in enumerate(schedule.lists) if at[r] < len(i)]
    if stand:
        raise ScheduleError(f"ranks wait for one another for ever: {', '.join(stand)}")


def waits_for(schedule: Schedule, i: Instruction) -> list[Instruction]:
    """Return the instructions, on any rank, that must be done before `i` can run.

    For sends and receives the list is empty, since these only start a message.
    """
    if message := schedule.needs(i):
        return [message, other_end(message)]
    source = schedule.reads(i)
    return [source] if source else []


def held(schedule: Schedule, rank: int) -> int:
    """Return the most chunks of micro-batches whose activations `rank` holds at once.

    A chunk's activations are held from F to the end of B or W.
    """
    changes = {"F": 1, "B": -1, "W": -1}
    return max(itertools.accumulate(changes.get(i.op, 0) for i in schedule.lists[rank]))
