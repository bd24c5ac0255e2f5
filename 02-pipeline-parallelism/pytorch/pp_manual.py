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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from rich.table import Column, Table
from torch import Tensor

from common import comm
from common.comm.mesh import Mesh
from common.comm.placement import sum_tied_gradients
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job
from common.lesson.runner import console, run
from common.models.transformer import Transformer

from pp_1f1b import ONE_F_ONE_B
from pp_bubble import draw, measure
from pp_costs import step_bytes
from pp_schedule import Instruction, Op
from pp_simulator import Event, Timeline
from pp_stages import cut_model, evenly
from pp_training import PipelineOptions, check, timed_job

T = TypeVar("T")
ONE_PIECE = "one piece"
KINDS = dict.fromkeys(
    ("micro-batches", ONE_PIECE), ONE_F_ONE_B
)  # the versions: in any number of pieces its bytes


class TwoStages:
    """This rank's half of the model, with its forward and backward pass."""

    def __init__(self, model: Transformer, mesh: Mesh, one_piece: bool = False) -> None:
        self.model, self.group, self.one_piece = model, mesh.group("pp"), one_piece
        self.stage = cut_model(model, (0, 1), mesh, evenly(len(model.layers), 2))[self.group.rank]
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
            x_BSD = self.timed("F", m, self.stage, tokens_BS)
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
        return self.model.loss(self.stage(x_BSD), targets_BS)[0]

    def timed(self, op: Op, m: int, compute: Callable[..., T], *given: Tensor) -> T:
        """Run `compute`, record its times, and return its result."""
        start = time.perf_counter()
        result = compute(*given)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        instruction = Instruction(op, self.group.rank, m)
        self.events.append(Event(self.group.rank, instruction, start, time.perf_counter()))
        return result


@dataclass
class ManualOptions(PipelineOptions, without=("chunks", "balance", "checkpointing")):
    """Options of two stages, whose numbers of layers differ by at most one."""


def train(job: Job[ManualOptions]) -> Iterator[Tensor]:
    """Train the two stages, in micro-batches or in one piece; yield the loss of each batch."""
    two = TwoStages(job.model, job.mesh, job.version == ONE_PIECE)  # the model keeps this rank's half
    optimizer = job.optimizer(job.model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # the same on both ranks: rank 0 reads tokens, rank 1 targets
        count = batch.count_targets()
        optimizer.zero_grad()
        loss_sum = two.run(batch.parts, 1 / count, batch.begin)  # forward and backward
        sum_tied_gradients(job.model.parameters())  # of a tied head, which is on both ranks
        optimizer.step()
        yield loss_sum / count


LESSON = Lesson("pp", dict.fromkeys(KINDS, train), step_bytes(KINDS))


def main(rt: Runtime, o: ManualOptions) -> bool:
    """Prove both versions equal to one device, or with --benchmark time them; print the bubble of each."""
    if rt.world_size != 2:
        raise UsageError(f"two stages need 2 ranks, here are {rt.world_size}; pp_gpipe.py takes any number")
    o = check(rt, o, KINDS)
    beside = replace(o, plot=None)  # --plot draws the timelines
    right = (time_in_turn if o.benchmark else prove)(rt, beside, LESSON)
    lines: dict[str, Timeline] = {}
    columns = (Column(name, justify="right") for name in ("formula", "measured"))
    table = Table("version", *columns, title="share of the time that is bubble", title_justify="left")
    for name in o.versions:
        job, pieces = timed_job(rt, o, name), 1 if name == ONE_PIECE else o.micro_batches
        lines[name] = measure(TwoStages(job.model, job.mesh, name == ONE_PIECE), job)
        table.add_row(name, f"{1 / (pieces + 1):.1%}", f"{float(lines[name].bubble):.1%}")
    console(rt).print(table)
    if o.plot and rt.rank == 0:
        draw(o.plot, lines)
    return right


if __name__ == "__main__":
    run(main, ManualOptions)
