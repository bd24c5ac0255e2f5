"""Executor of schedules: one method for each kind of instruction, and the buffers between them.

    for i in schedule.lists[rank]:     F  forward     B I W  backward     SX SG  send     RX RG  receive

Between forward and backward of a micro-batch, a stage keeps its input, and an edge into autograd's graph for
its output; the output itself is freed once it is sent. A rank completes a send when a later message of the
receiver proves that the send was received (`settled`), otherwise at the end of the step, so it never blocks
on a send in between.

Messages to higher ranks go through one process group and those to lower ranks through another: a library may carry out
the messages of a group in order, and the two directions must not wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from common import comm
from common.comm import Group, Pending
from common.comm.mesh import Mesh

from pp_deferred import Deferred, Work
from pp_schedule import COMPUTE, Instruction, Schedule, completing, settled
from pp_simulator import Event

Part = tuple[Tensor, ...]  # tokens_BS, perhaps positions_S, targets_BS
Key = tuple[str, int, int]  # X or G, the stage that reads it, the micro-batch


class Executor:
    """Executor of one rank's instruction list.

    stages: the stages of this rank, by number; each maps (x, positions_S) to its output. loss(logits, targets):
    (sum, count). shape(tokens_BS): the shape of activations between stages, [B, S, D] as a rule. Under
    torch.no_grad a forward pass keeps nothing for a backward pass. After a run `events` holds the computations
    with their times, in seconds of this machine's clock.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Callable[[Tensor, Tensor], Tensor]],
        mesh: Mesh,
        loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        shape: Callable[[Tensor], tuple[int, ...]],
        dtype: torch.dtype,
        deferred: Deferred,
    ) -> None:
        self.schedule, self.stages, self.loss = schedule, stages, loss
        self.shape, self.dtype, self.deferred = shape, dtype, deferred
        self.group = mesh.group("pp")
        self.ways = {
            up: mesh.part("pp", range(self.group.size), "up" if up else "down") for up in (True, False)
        }
        self.instructions = schedule.lists[self.group.rank]
        self.settled = settled(schedule, self.group.rank)
        self.completing = completing(schedule, self.group.rank)
        self.events: list[Event] = []

    def run(
        self,
        parts: list[Part],
        scale: float,
        begin: Callable[[int], None],
        no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of their losses, on every pp rank.

        parts: the tensors of each micro-batch. scale: factor of the losses in the backward pass. begin(m):
        called before each computation of micro-batch m. no_sync: context of computations that complete no
        gradient; data parallelism sends gradients in the others. Raises ValueError unless there are as many parts
        as micro-batches.
        """
        if len(parts) != self.schedule.micro_batches:
            raise ValueError(
                f"{len(parts)} parts for a schedule of {self.schedule.micro_batches} micro-batches"
            )
        self.parts, self.scale = parts, scale
        self.total = torch.zeros((), dtype=self.dtype, device=parts[0][0].device)
        self.here: dict[Key, Tensor] = {}  # made on this rank, to be read or sent
        self.arriving: dict[Key, tuple[Tensor, Pending]] = {}
        self.leaving: dict[Instruction, Pending] = {}
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], GradientEdge] = {}
        self.put_off: dict[tuple[int, int], list[Work]] = {}
        self.events = []
        for i in self.instructions:
            if i.op in COMPUTE:
                begin(i.micro)
                with nullcontext() if i in self.completing else no_sync():
                    self.compute(i)
            elif i.op[0] == "S":
                self.send(i)
            else:
                self.receive(i)
        for pending in self.leaving.values():
            pending.wait()
        comm.all_reduce(self.total, self.group)
        return self.total

    def compute(self, i: Instruction) -> None:
        """Run a computation and record its times, without the wait for its input."""
        read = self.read(i)
        self.end_of_kernels()
        start = time.perf_counter()
        if i.op == "F":
            self.forward(i.stage, i.micro, read)
        elif i.op == "W":
            for work in self.put_off.pop((i.stage, i.micro)):
                work()
        elif i.op == "I":
            with self.deferred.collect() as self.put_off[i.stage, i.micro]:
                self.backward(i.stage, i.micro, read)
        else:
            self.backward(i.stage, i.micro, read)
        self.end_of_kernels()
        self.events.append(Event(self.group.rank, i, start, time.perf_counter()))

    def end_of_kernels(self) -> None:
        """On a GPU, wait for computations but not for messages: those posted early have their own streams."""
        if self.total.is_cuda:
            torch.cuda.current_stream().synchronize()

    def forward(self, stage: int, m: int, x: Tensor | None) -> None:
        """Run the forward of a stage for micro-batch m. x: the previous stage's output, None in the first."""
        tokens, *rest, targets = self.parts[m]
        trains = torch.is_grad_enabled()
        positions = rest[0] if rest else torch.arange(tokens.shape[1], device=tokens.device)
        if x is not None and trains:
            self.inputs[stage, m] = x.requires_grad_()
        y = self.stages[stage](tokens if x is None else x, positions)
        if stage == self.schedule.stages - 1:
            y, _ = self.loss(y, targets)
            self.total += y.detach()
            y = y * self.scale
        else:
            self.here["X", stage + 1, m] = y.detach()
        if trains:
            self.outputs[stage, m] = get_gradient_edge(y)

    def backward(self, stage: int, m: int, dy: Tensor | None) -> None:
        """Run the backward of a stage for micro-batch m.

        dy: the gradient of the stage's output, None in the last, whose output is the loss.
        """
        dy = torch.ones_like(self.total) if dy is None else dy
        torch.autograd.backward([self.outputs.pop((stage, m))], [dy])
        if stage > 0:
            gradient = self.inputs.pop((stage, m)).grad
            assert gradient is not None
            self.here["G", stage - 1, m] = gradient

    def read(self, i: Instruction) -> Tensor | None:
        """Return the tensor that a computation reads from another stage, or None; wait for its message."""
        key = ("X" if i.op == "F" else "G", i.stage, i.micro)
        message = self.schedule.needs(i)
        if message is None:
            return None if i.op == "W" or self.schedule.reads(i) is None else self.here.pop(key)
        x, pending = self.arriving.pop(key)
        pending.wait()
        for send in self.settled.get(message, ()):
            self.leaving.pop(send).wait()
        return x

    def send(self, i: Instruction) -> None:
        """Start to send a tensor that this rank made."""
        reader = i.stage + (1 if i.op == "SX" else -1)
        x = self.here.pop((i.op[1], reader, i.micro))
        group, peer = self.way(i, 1)
        self.leaving[i] = comm.send(x, group, peer, async_op=True)

    def receive(self, i: Instruction) -> None:
        """Start to receive a tensor that another rank sends."""
        x = torch.empty(self.shape(self.parts[i.micro][0]), dtype=self.dtype, device=self.total.device)
        group, peer = self.way(i, 0)
        self.arriving[i.op[1], i.stage, i.micro] = x, comm.recv(x, group, peer, async_op=True)

    def way(self, i: Instruction, end: int) -> tuple[Group, int]:
        """Return the process group of a message and a rank: its sender for end 0, its receiver for end 1."""
        channel = self.schedule.channel(i)
        group = self.ways[channel[0] < channel[1]]
        assert group is not None
        return group, channel[end]
