"""Pipeline schedules as data: for every rank a list of instructions, in order. One executor runs them all.

    F s m    forward of stage s for micro-batch m          SX  send the activations that stage s made to stage s+1
    B s m    backward, for the input and for the weights   RX  receive the activations that stage s needs
    I s m    backward for the input alone                  SG  send the gradient that stage s made to stage s-1
    W s m    backward for the weights, later               RG  receive the gradient that stage s needs

A generator (pp_gpipe.py, pp_1f1b.py, ...) yields what one rank computes; `connect` adds the messages, the
same way for all schedules. The checker, the simulator, the picture, the executors in Python and in C++ read
only the resulting Schedule. A schedule as text is one line per rank:

    F 0 0;SX 0 0;RG 0 0;F 0 1;SX 0 1;RG 0 1;B 0 0;B 0 1
    RX 1 0;F 1 0;RX 1 1;B 1 0;SG 1 0;F 1 1;B 1 1;SG 1 1

An instruction for a message starts it and does not wait; a computation waits for the tensors that it reads.
Messages from one rank to another arrive in the order in which they were sent, so both ranks must list them in
the same order.

This file imports only Python's standard library, since the C++ executors get their lists from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Op = Literal["F", "B", "I", "W", "SX", "RX", "SG", "RG"]
COMPUTE = ("F", "B", "I", "W")
Channel = tuple[int, int]  # from rank, to rank
OTHER_END: dict[Op, tuple[Op, int]] = {"SX": ("RX", 1), "RX": ("SX", -1), "SG": ("RG", -1), "RG": ("SG", 1)}


class Instruction(NamedTuple):
    """Action of a rank, for one micro-batch in one stage."""

    op: Op
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.op} {self.stage} {self.micro}"


@dataclass(frozen=True)
class Schedule:
    """Schedule of all ranks. owner: the rank of each stage. lists: each rank's instructions, in order."""

    name: str
    micro_batches: int
    owner: tuple[int, ...]
    lists: tuple[tuple[Instruction, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.lists)

    @property
    def stages(self) -> int:
        return len(self.owner)

    @cached_property
    def whole(self) -> frozenset[Instruction]:
        """The backward passes that are not split."""
        return frozenset(i for instructions in self.lists for i in instructions if i.op == "B")

    def mine(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, first to last."""
        return tuple(stage for stage, owner in enumerate(self.owner) if owner == rank)

    def channel(self, i: Instruction) -> Channel:
        """Return the channel of a message: (sending rank, receiving rank)."""
        here, there = self.owner[i.stage], self.owner[other_end(i).stage]
        return (here, there) if i.op[0] == "S" else (there, here)

    def reads(self, i: Instruction) -> Instruction | None:
        """Return the computation, on any rank, whose result `i` reads; None for the batch or the loss."""
        if i.op == "F" and i.stage > 0:
            return Instruction("F", i.stage - 1, i.micro)
        if i.op in ("B", "I") and i.stage < self.stages - 1:
            whole = Instruction("B", i.stage + 1, i.micro)  # or I, where the backward pass is split
            return whole if whole in self.whole else whole._replace(op="I")
        return None

    def needs(self, i: Instruction) -> Instruction | None:
        """Return the message that a computation waits for; None if its input was made on the same rank."""
        return self._message(i, {"F": "RX", "B": "RG", "I": "RG"})

    def makes(self, i: Instruction) -> Instruction | None:
        """Return the message that sends a computation's result; None if the same rank reads the result."""
        return self._message(i, {"F": "SX", "B": "SG", "I": "SG"})

    def _message(self, i: Instruction, ops: dict[Op, Op]) -> Instruction | None:
        if i.op not in ops:
            return None
        message = Instruction(ops[i.op], i.stage, i.micro)
        inside = 0 <= other_end(message).stage < self.stages
        return message if inside and len(set(self.channel(message))) > 1 else None

    def __str__(self) -> str:
        return "\n".join(";".join(map(str, instructions)) for instructions in self.lists)


def connect(
    name: str, micro_batches: int, owner: Sequence[int], computed: Sequence[Sequence[Instruction]]
) -> Schedule:
    """Return the schedule in which ranks compute these lists and every message is sent as soon as it can be.

    A send follows the computation of its tensor. A receive stands before the computation that precedes the
    one that needs it, so that the message may travel meanwhile, and after the receives of all earlier
    messages on its channel.
    """
    plan = Schedule(name, micro_batches, tuple(owner), tuple(map(tuple, computed)))
    sent: dict[Channel, list[Instruction]] = {}
    for instructions in plan.lists:
        for i in instructions:
            if message := plan.makes(i):
                sent.setdefault(plan.channel(message), []).append(other_end(message))
    lists = []
    for rank, instructions in enumerate(plan.lists):
        arriving = {channel: iter(messages) for channel, messages in sent.items() if channel[1] == rank}
        posted: set[Instruction] = set()
        out: list[Instruction] = []
        for here, ahead in zip([None, *instructions], [*instructions, None], strict=True):
            wanted = plan.needs(ahead) if ahead else None
            while wanted and wanted not in posted:
                message = next(arriving[plan.channel(wanted)], wanted)
                posted.add(message)
                out.append(message)
            if here:
                out.append(here)
                if message := plan.makes(here):
                    out.append(message)
        lists.append(tuple(out))
    return Schedule(name, micro_batches, tuple(owner), tuple(lists))


def forward_only(owner: Sequence[int], micro_batches: int) -> Schedule:
    """Return a schedule for evaluation: each rank's stages one after the other, all micro-batches of each."""
    computed = [
        [
            Instruction("F", stage, m)
            for stage, of in enumerate(owner)
            if of == rank
            for m in range(micro_batches)
        ]
        for rank in range(max(owner) + 1)
    ]
    return connect("forward", micro_batches, owner, computed)


def settled(schedule: Schedule, rank: int) -> dict[Instruction, list[Instruction]]:
    """Return, for each receive of a rank, the sends that are proven complete when its message has arrived.

    The peer sent that message after it had used the tensors of these sends, so their buffers can be freed
    without a wait. Sends that no message proves complete are waited for at the end.
    """
    place = [{i: at for at, i in enumerate(instructions)} for instructions in schedule.lists]
    reader = {m: i for row in schedule.lists for i in row if i.op in COMPUTE and (m := schedule.needs(i))}
    shows: dict[Instruction, list[Instruction]] = {}
    for send in (i for i in schedule.lists[rank] if i.op[0] == "S"):
        peer = schedule.channel(send)[1]
        used = place[peer][reader[other_end(send)]]
        for receive in schedule.lists[rank]:
            if (
                receive.op[0] == "R"
                and schedule.channel(receive)[0] == peer
                and place[peer][other_end(receive)] > used
            ):
                shows.setdefault(receive, []).append(send)
                break
    return shows


def completing(schedule: Schedule, rank: int) -> set[Instruction]:
    """Return the instructions that complete gradients of a rank: each stage's last B, or its last I and W."""
    last = {(i.stage, i.op): i for i in schedule.lists[rank] if i.op in ("B", "I", "W")}
    return set(last.values())


def other_end(message: Instruction) -> Instruction:
    """Return the receive of a send, or the send of a receive."""
    op, step = OTHER_END[message.op]
    return Instruction(op, message.stage + step, message.micro)
