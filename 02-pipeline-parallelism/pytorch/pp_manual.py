"""Two stages by hand: send and recv are all it takes. Then the wait, and what micro-batches do to it.

    rank 0   layers 0 .. L/2     F ---- send x ---->                     recv dx, B
    rank 1   layers L/2 .. L                          recv x, F, B ---- send dx ---->

One batch in one piece:  rank 1 waits while rank 0 computes, and the reverse: half of all time is bubble.

    rank 0   [   F   ]               [      B      ]
    rank 1            [   F   |      B      ]

M micro-batches, all forward and then all backward: while rank 1 computes the first, rank 0 computes the second. Of the
M + 1 places in a row, one is empty: the bubble is 1 / (M + 1) of the time.

    rank 0   [0][1][2][3]      [  0 ][  1 ][  2 ][  3 ]
    rank 1      [0][1][2][3][  0 ][  1 ][  2 ][  3 ]

Each rank sends B S D numbers a step, in M pieces. `pp_1f1b.py` and those after it are this with more ranks, with the
order as data. Run on two ranks:

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
from pp_bubble import draw, measure
from pp_schedule import Instruction, Op
from pp_simulator import Event
from pp_stages import cut_model, evenly
from pp_training import PipelineOptions, check, make_batches
from pp_training import run_bytes as pipeline_run_bytes
from pp_training import step_bytes as pipeline_bytes
from rich.table import Table
from torch import Tensor, nn

from common import comm, comparison
from common.comm import Group
from common.comparison import benchmark, prove, report
from common.errors import UsageError
from common.lesson import console, run
from common.mesh import Mesh
from common.models.transformer import Transformer
from common.placement import sum_tied_gradients
from common.runtime import Runtime
from common.training import Version

T = TypeVar("T")
VERSIONS = ("micro-batches", "one piece")


class TwoStages:
    """This rank's half of the model, and a step of it."""

    def __init__(self, model: Transformer, rt: Runtime, one_piece: bool = False) -> None:
        mesh = Mesh(rt.world, pp=2, timeout=rt.timeout)
        self.stage = cut_model(model, (0, 1), mesh, evenly(len(model.layers), 2))[rt.rank]
        self.model, self.group, self.one_piece = model, mesh.group("pp"), one_piece
        self.events: list[Event] = []

    def run(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Forward and backward of all micro-batches; the sum of their losses, on both ranks."""
        self.events = []
        if self.one_piece:
            parts = [tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))]
        total = (self.first if self.group.rank == 0 else self.last)(parts, scale, begin)
        comm.all_reduce(total, self.group)
        return total

    def first(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Rank 0: activations go, their gradients come back."""
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
        """Rank 1: it has the loss, so gradients begin here."""
        arrived = []
        for m, (tokens_BS, targets_BS) in enumerate(parts):
            begin(m)
            x_BSD = next(self.model.parameters()).new_empty(*tokens_BS.shape, self.model.config.width)
            comm.recv(x_BSD, self.group, 0)
            x_BSD.requires_grad_()  # a leaf: backward stops here, and leaves what the other rank waits for
            arrived.append((x_BSD, self.timed("F", m, self.loss, x_BSD, targets_BS)))
        for m, (x_BSD, loss) in enumerate(arrived):
            begin(m)
            self.timed("B", m, (loss * scale).backward)
            assert x_BSD.grad is not None
            comm.send(x_BSD.grad, self.group, 0)
        return torch.stack([loss.detach() for _, loss in arrived]).sum()

    def loss(self, x_BSD: Tensor, targets_BS: Tensor) -> Tensor:
        """Summed over the micro-batch; the whole batch's tokens divide it, once, in `scale`."""
        return self.model.loss(self.stage(x_BSD, positions(targets_BS)), targets_BS)[0]

    def timed(self, op: Op, m: int, compute: Callable[..., T], *given: Tensor) -> T:
        """Compute, and note when."""
        start = time.perf_counter()
        result = compute(*given)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        instruction = Instruction(op, self.group.rank, m)
        self.events.append(Event(self.group.rank, instruction, start, time.perf_counter()))
        return result

    def finish(self) -> None:
        """A tied head is on both ranks: the two parts of its gradient are summed."""
        sum_tied_gradients(self.model.parameters())


def positions(tokens_BS: Tensor) -> Tensor:
    """0 .. S - 1."""
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device)


def make(name: str, model: Transformer, rt: Runtime) -> TwoStages:
    """In one piece or in micro-batches."""
    return TwoStages(model, rt, one_piece=name == "one piece")


def make_version(name: str, model: Transformer, rt: Runtime, o: PipelineOptions) -> Version:
    """The training step's view of it."""
    two = make(name, model, rt)
    return Version(model, run=two.run, finish=two.finish)


def step_bytes(name: str, model: nn.Module, group: Group, o: PipelineOptions) -> Fraction:
    """B S D numbers, in however many pieces; the loss; the gradient of a tied head."""
    return pipeline_bytes("1f1b", model, group, o)


def run_bytes(name: str, model: nn.Module, group: Group, o: PipelineOptions) -> Fraction:
    """Of all steps."""
    return pipeline_run_bytes("1f1b", model, group, o)


@dataclass
class ManualOptions(PipelineOptions, without=("chunks", "balance", "checkpointing")):
    """Options of two stages, of equally many layers."""


def main(rt: Runtime, o: ManualOptions) -> bool:
    """Both versions equal to one device; what each waits."""
    if rt.world_size != 2:
        raise UsageError(f"two stages need 2 ranks, here are {rt.world_size}; pp_gpipe.py takes any number")
    o = replace(o, versions=o.versions or VERSIONS)
    comparison.check(rt, VERSIONS, o)
    check(rt, o)
    right, plot, o = True, o.plot, replace(o, plot=None)
    if o.benchmark:
        report(rt, o, benchmark(rt, o, make_version, step_bytes, (), make_batches, axis="pp"))
    else:
        right = prove(rt, o, make_version, run_bytes, step_bytes, (), make_batches=make_batches, axis="pp")
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
