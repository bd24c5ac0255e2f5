"""nn.DataParallel, shown with ranks: one device owns the model, and all data passes through it.

    rank 0 (device 0)            ranks 1 ... n-1
    whole batch        --- scatter: B/n samples --->  samples
    weights W          --- replicate: all of W  --->  weights          again in every step
    logits of B        <-- gather: B/n logits  -----  forward
    loss, d logits     --- scatter              --->  backward
    sum of gradients   <-- reduce: all of W    -----  gradients
    optimizer's step                                                   nothing to step on

The sums are the same as on one device, and so is the result. But in a step rank 0 sends (n-1) W and receives
as much, while the others wait, and rank 0 alone holds the logits of the whole batch and their gradient, 2 B S
V numbers. In dp_basic.py each rank sends 2(n-1)/n W, less than 2 W for any n. nn.DataParallel's devices also
share one process: n threads, one Python interpreter.

Here every message is sent separately, so that the ledger shows the bytes of each rank. On GPUs
nn.DataParallel replicates and reduces by NCCL, which passes W on from device to device; scatter, gather, the
loss and the step stay on device 0.

    python dp_data_parallel.py --nproc 4    torchrun --nproc_per_node=4 dp_data_parallel.py
    mpirun -np 4 python dp_data_parallel.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common import comm
from common.comm import Group, sizes_of
from common.comm.ledger import Ledger, show_bytes
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.lesson.training import Batches, make_model
from common.models.transformer import Transformer, cross_entropy_sum

import dp_basic
from dp_costs import basic_step, bytes_by_rank, one_process_run, one_process_step
from dp_training import DataParallelOptions, check


def scatter(pieces: Sequence[Tensor], mine: Tensor, group: Group) -> Tensor:
    """Send piece r of rank 0 to rank r, and return this rank's piece.

    mine: receive buffer on the ranks above 0. Rank 0 sends all pieces but the first, others nothing.
    """
    if group.rank > 0:
        comm.recv(mine, group, 0)
        return mine
    for r in range(1, group.size):
        comm.send(pieces[r], group, r)
    return pieces[0]


def gather(mine: Tensor, rooms: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Return every rank's piece on rank 0, elsewhere an empty list.

    rooms: receive buffers on rank 0. Rank 0 sends nothing, others their piece.
    """
    if group.rank > 0:
        comm.send(mine, group, 0)
        return []
    for r in range(1, group.size):
        comm.recv(rooms[r], group, r)
    return [mine, *rooms[1:]]


class OneProcess:
    """Training step of nn.DataParallel: rank 0 owns model, batch, loss and gradients; others compute."""

    def __init__(
        self, model: Transformer, o: DataParallelOptions, group: Group, device: torch.device
    ) -> None:
        self.model, self.group, self.owner = model, group, group.rank == 0
        self.batches = Batches(replace(o, micro_batches=1), Group.alone(), device)
        self.samples = sizes_of(o.batch, group.size)
        self.tokens_bS = torch.empty(self.samples[group.rank], o.sequence, dtype=torch.int64, device=device)
        self.logits_bytes = 0  # of the largest tensor of logits that this rank held

    def step(self, t: int) -> Tensor:
        """Run forward and backward of global step t.

        Rank 0 returns the loss and keeps the gradients; the others return zero and keep none.
        """
        tokens_BS, targets_BS = self.batches.parts(t)[0] if self.owner else (self.tokens_bS, None)
        tokens_bS = scatter(tokens_BS.split(self.samples) if self.owner else [], self.tokens_bS, self.group)
        self.replicate()
        logits_bSV = self.model(tokens_bS)
        dlogits_bSV, loss = self.loss_on_rank_0(logits_bSV.detach(), targets_BS)
        logits_bSV.backward(dlogits_bSV)
        self.reduce()
        return loss

    def replicate(self) -> None:
        """Copy all weights of rank 0 to every rank, in every step."""
        flat = parameters_to_vector(self.model.parameters()).detach()
        scatter([flat] * self.group.size, flat, self.group)
        if not self.owner:
            vector_to_parameters(flat, self.model.parameters())

    def loss_on_rank_0(self, logits_bSV: Tensor, targets_BS: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (gradient of this rank's logits, loss).

        Rank 0 computes both from all logits and scatters the gradient; the loss of the other ranks is 0.
        """
        rooms = [logits_bSV.new_empty(b, *logits_bSV.shape[1:]) for b in self.samples if self.owner]
        pieces = gather(logits_bSV, rooms, self.group)
        logits_BSV = torch.cat(pieces).requires_grad_() if pieces else logits_bSV
        self.logits_bytes = max(self.logits_bytes, logits_BSV.numel() * logits_BSV.element_size())
        loss = logits_bSV.new_zeros(())
        if targets_BS is not None:
            total, count = cross_entropy_sum(logits_BSV, targets_BS)
            loss = total / count
            (pieces_BSV,) = torch.autograd.grad(loss, logits_BSV)
            pieces = list(pieces_BSV.split(self.samples))
        return scatter(pieces, torch.empty_like(logits_bSV), self.group), loss.detach()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients on rank 0, one rank's after the other; the other ranks then drop theirs."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = parameters_to_vector(gradients)
        if self.owner:
            theirs = torch.empty_like(flat)
            for r in range(1, self.group.size):
                comm.recv(theirs, self.group, r)
                flat += theirs
            vector_to_parameters(flat, gradients)
        else:
            comm.send(flat, self.group, 0)
            self.model.zero_grad()


def train(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train with everything through rank 0; yield each step's loss there, zero on the other ranks."""
    one = OneProcess(job.model, job.options, job.group, job.rt.device)
    optimizer = job.optimizer(job.model)
    for t in job.numbers():
        optimizer.zero_grad()
        loss = one.step(t)
        optimizer.step()  # on rank 0; the others have no gradients
        yield loss


def train_library(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train with nn.DataParallel, which without GPUs calls the model itself; yield each step's loss."""
    parallel = nn.DataParallel(job.model)
    optimizer = job.optimizer(job.model)
    for batch in replace(job, mesh=Mesh(Group.alone())).batches():  # whole batches
        count, losses = batch.count_targets(), []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = cross_entropy_sum(parallel(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        yield total(losses)


LESSON = Lesson(
    "dp",
    {"one process": train, "nn.DataParallel": train_library, "bucketed": dp_basic.train},
    one_process_step,
    run_bytes=one_process_run,
    unseen=("nn.DataParallel",),
    on_rank_0=("one process", "nn.DataParallel"),
)


def bytes_table(rt: Runtime, o: DataParallelOptions) -> Table:
    """Return a table of each rank's bytes in a step, beside dp_basic.py's, and of the logits that it holds."""
    one = OneProcess(make_model(o, rt.device), o, rt.world, rt.device)
    with Ledger() as ledger:
        one.step(0)
    ranks = comm.everyones((ledger.bytes(), one.logits_bytes), rt.world)
    table = Table(title="by rank, bytes: a step, and logits held at once", title_justify="left")
    for column in ("rank", "sends", "by formula", "receives", "dp_basic.py sends", "logits", "a rank's own"):
        table.add_column(column, justify="right")
    basic = basic_step("bucketed", one.model, rt.world, o)
    for r, formula in enumerate(bytes_by_rank(one.model, o, rt.world_size)):
        (sent, logits), own = ranks[r], ranks[0][1] * one.samples[r] // o.batch
        row: list[Fraction | int] = [sent, *formula, basic, logits, own]
        table.add_row(str(r), *map(show_bytes, row))
    return table


def main(rt: Runtime, o: DataParallelOptions) -> bool:
    """Prove equality with one device, or with --benchmark time."""
    check(rt, tuple(LESSON.versions), o)
    Batches(o, rt.world, rt.device)  # refuses a batch with fewer samples than ranks
    o = replace(o, micro_batches=1)  # nn.DataParallel has none
    if o.benchmark:
        return time_in_turn(rt, o, LESSON)
    console(rt).print(bytes_table(rt, o))
    return prove(rt, o, LESSON)


if __name__ == "__main__":
    run(main, DataParallelOptions, versions=LESSON.versions)
