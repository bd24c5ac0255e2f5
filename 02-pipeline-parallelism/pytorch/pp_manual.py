"""Two pipeline stages by hand, with send and recv: the bubble, and how micro-batches shrink it.

    rank 0   layers 0 .. L/2     F ---- send x ---->                     recv dx, B
    rank 1   layers L/2 .. L                          recv x, F, B ---- send dx ---->

One batch in one piece:  rank 1 waits while rank 0 computes, and vice versa: half of all time is bubble.

    rank 0   [   F   ]               [      B      ]
    rank 1            [   F   |      B      ]

M micro-batches, all forward and then all backward: while rank 1 computes the first, rank 0 computes the
second. Each rank idles in one of M + 1 slots: the bubble is 1 / (M + 1) of the time.

    rank 0   [0][1][2][3]      [  0 ][  1 ][  2 ][  3 ]
    rank 1      [0][1][2][3][  0 ][  1 ][  2 ][  3 ]

Each rank sends B S D numbers per step, in M pieces. `pp_1f1b.py` and the lessons after it do the same with
more ranks, and with the order as data. Run on two ranks:

    python pp_manual.py --nproc 2      torchrun --nproc_per_node=2 pp_manual.py      mpirun -np 2 python pp_manual.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TypeVar

import torch
from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import sum_tied_gradients
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.comparison import Lesson, by_version, prove, time_in_turn
from common.lesson.runner import console, run
from common.lesson.training import Version
from common.models.transformer import Transformer

from pp_bubble import draw, measure
from pp_schedule import Instruction, Op
from pp_simulator import Event
from pp_stages import cut_model, evenly
from pp_training import PipelineOptions, check, make_batches
from pp_training import step_bytes as pipeline_bytes

T = TypeVar("T")
VERSIONS = ("micro-batches", "one piece")


class TwoStages:
    """This rank's half of the model, and a training step of it."""

    def __init__(self, model: Transformer, rt: Runtime, one_piece: bool = False) -> None:
        mesh = Mesh(rt.world, pp=2, timeout=rt.timeout)
        self.stage = cut_model(model, (0, 1), mesh, evenly(len(model.layers), 2))[rt.rank]
        self.model, self.group, self.one_piece = model, mesh.group("pp"), one_piece
        self.events: list[Event] = []

    def run(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of their losses, on both ranks."""
        self.events = []
        if self.one_piece:
            parts = [tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))]
        total = (self.first if self.group.rank == 0 else self.last)(parts, scale, begin)
        comm.all_reduce(total, self.group)
        return total

    def first(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Run rank 0's half: send activations, then receive their gradients; return 0."""
        left = []
        for m, (tokens_BS, _) in enumerate(parts):
            begin(m)
            x_BSD = self.timed("F", m, self.stage, tokens_BS, positions(tokens_BS))
            comm.send(x_BSD.detach(), self.group, 1)
            left.append(x_BSD)
        for m, x_BSD in enumerate(left):
            begin(m)
            dx_BSD = torch.empty_like(x_BSD)
            comm.recv(dx_BSD, self.group, 1)
            self.timed("B", m, x_BSD.backward, dx_BSD)
        return torch.zeros((), dtype=dx_BSD.dtype, device=dx_BSD.device)

    def last(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Run rank 1's half: it has the loss, so gradients begin here; return the sum of the losses."""
        arrived = []
        for m, (tokens_BS, targets_BS) in enumerate(parts):
            begin(m)
            x_BSD = next(self.model.parameters()).new_empty(*tokens_BS.shape, self.model.config.width)
            comm.recv(x_BSD, self.group, 0)
            x_BSD.requires_grad_()  # a leaf: backward ends here, with the gradient for rank 0
            arrived.append((x_BSD, self.timed("F", m, self.loss, x_BSD, targets_BS)))
        for m, (x_BSD, loss) in enumerate(arrived):
            begin(m)
            self.timed("B", m, (loss * scale).backward)
            assert x_BSD.grad is not None
            comm.send(x_BSD.grad, self.group, 0)
        return torch.stack([loss.detach() for _, loss in arrived]).sum()

    def loss(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the sum of the losses of a micro-batch.

        `scale` divides it, once, by the tokens of the whole batch.
        """
        return self.model.loss(self.stage(x_BSD, positions(targets_BS)), targets_BS)[0]

    def timed(self, op: Op, m: int, compute: Callable[..., T], *given: Tensor) -> T:
        """Run `compute`, record its times, and return its result."""
        start = time.perf_counter()
        result = compute(*given)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        instruction = Instruction(op, self.group.rank, m)
        self.events.append(Event(self.group.rank, instruction, start, time.perf_counter()))
        return result

    def finish(self) -> None:
        """Sum the two parts of a tied head's gradient, since the head is on both ranks."""
        sum_tied_gradients(self.model.parameters())


def positions(tokens_BS: Tensor) -> Tensor:
    """Return the positions 0 .. S - 1."""
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device)


def make(name: str, model: Transformer, rt: Runtime) -> TwoStages:
    """Return the two stages, in one piece or in micro-batches."""
    return TwoStages(model, rt, one_piece=name == "one piece")


def make_version(name: str, model: Transformer, rt: Runtime, o: PipelineOptions) -> Version:
    """Return the version `name`, in the form that the training step needs."""
    two = make(name, model, rt)
    return Version(model, run=two.run, finish=two.finish)


def step_bytes(name: str, model: nn.Module, group: Group, o: PipelineOptions) -> Fraction:
    """Return the bytes this rank sends in a step.

    They are B S D numbers, in any number of pieces; the loss; the gradient of a tied head.
    """
    return pipeline_bytes("1f1b", model, group, o)


LESSON = Lesson("pp", dict.fromkeys(VERSIONS, by_version(make_version, make_batches)), step_bytes)


@dataclass
class ManualOptions(PipelineOptions, without=("chunks", "balance", "checkpointing")):
    """Options of two stages, whose numbers of layers differ by at most one."""


def main(rt: Runtime, o: ManualOptions) -> bool:
    """Prove both versions equal to one device, or with --benchmark time them; print the bubble of each."""
    if rt.world_size != 2:
        raise UsageError(f"two stages need 2 ranks, here are {rt.world_size}; pp_gpipe.py takes any number")
    o = replace(o, versions=o.versions or VERSIONS)
    comparison.check(rt, VERSIONS, o)
    check(rt, o)
    right, plot, o = True, o.plot, replace(o, plot=None)
    if o.benchmark:
        time_in_turn(rt, o, LESSON)
    else:
        right = prove(rt, o, LESSON)
    batches = make_batches(o, rt.world, rt.device)
    lines = {name: measure(partial(make, name, rt=rt), rt, o, batches) for name in o.versions}
    table = Table("version", title="share of the time that is bubble", title_justify="left")
    for column in ("formula", "measured"):
        table.add_column(column, justify="right")
    for name, line in lines.items():
        pieces = 1 if name == "one piece" else o.micro_batches
        table.add_row(name, f"{1 / (pieces + 1):.1%}", f"{float(line.bubble):.1%}")
    console(rt).print(table)
    if plot and rt.rank == 0:
        draw(plot, lines)
    return right


if __name__ == "__main__":
    run(main, ManualOptions)
