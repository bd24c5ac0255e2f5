"""Proof of dp_compression.py: each version beside one device that compresses likewise; the effect of the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group, share
from common.comm.ledger import Ledger, show_bytes
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, benchmark, report
from common.lesson.equality import OPTIMIZERS, Followed, Start, watch, with_units
from common.lesson.job import Job, Train, one_device
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console
from common.lesson.training import make_model
from common.utils.visualizer import figure, loss_curves

from dp_basic import DataParallel
from dp_compression_simulated import Simulation, compression
from dp_compression_simulated import train as train_simulated
from dp_compressor import COMPRESSORS, CompressionOptions, Compressor, compressor_of, joined

MakeCompressor = Callable[[str, Group, CompressionOptions, bool], Compressor]


def on_one_device(name: str, optimizer: str, rt: Runtime, o: CompressionOptions) -> Followed:
    """Train on one device, plainly or with a simulated compressor; return the result, with units."""

    def run(start: Start) -> Followed:
        model, alone = start(make_model(o, rt.device)), Mesh(Group.alone())
        given = replace(o, micro_batches=1) if name == "bucketed" else o
        job = Job(rt, given, name, model, alone, "dp", OPTIMIZERS[optimizer], o.steps)
        if name == "bucketed":
            return watch(one_device(job), job)
        return watch(train_simulated(job, Simulation(compression(name, o)), rt.world_size), job)

    return with_units(run)


def on_ranks(train: Train, job: Job[Any], mesh: Mesh) -> tuple[Followed, Ledger]:
    """Train on all ranks; return (the results, the ledger of the bytes sent)."""
    with Ledger() as ledger:
        return watch(train(job), job, mesh), ledger


def same_on_all_ranks(followed: Followed, group: Group) -> bool:
    """Return True if all gradients of all steps, and the last weights, are bitwise equal on all ranks."""
    mine = joined(t for tensors in (*followed.gradients, followed.weights) for t in tensors.values())
    low, high = mine.clone(), mine.clone()
    comm.all_reduce(low, group, "min")
    comm.all_reduce(high, group, "max")
    return torch.equal(low, high)


class Quarrel(nn.Module):
    """Model of two weights, trained on two kinds of samples.

    Their gradients for the first weight are large and disagree; those for the second are small and agree that
    it should be 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, t: int) -> Tensor:
        """Return the loss of step t; its gradient is (w₀ ± 4, w₁ - 1)."""
        slope = torch.tensor([4.0 if t % 2 else -4.0, -1.0], dtype=torch.float64)
        return (slope * self.w + self.w**2 / 2).sum()


def quarrel(exchange: Compressor) -> float:
    """Return the second weight after 150 steps of SGD on one rank, with this exchange."""
    model = Quarrel()
    dp = DataParallel(model, Group.alone(), exchange=exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for t in range(150):
        optimizer.zero_grad()
        model(t).backward()
        dp.finish()
        optimizer.step()
    return model.w[1].item()


def stall(make_compressor: MakeCompressor, o: CompressionOptions) -> tuple[bool, Table]:
    """Return (True if the second weight converges with memory and stays at 0 without, a table)."""
    table = Table(title="two weights, 150 steps", title_justify="left")
    for column in ("", "both sent", "top-1 with memory", "top-1 without"):
        table.add_column(column, justify="right")
    weights = [
        quarrel(make_compressor("top-k", Group.alone(), replace(o, k=share), memory))
        for share, memory in ((1.0, True), (0.5, True), (0.5, False))
    ]
    table.add_row("the second, should be 1", *(f"{w:.3f}" for w in weights))
    return abs(weights[1] - 1) < 0.1 and weights[2] == 0, table


def prove(
    rt: Runtime, o: CompressionOptions, lesson: Lesson, make_compressor: MakeCompressor, memoryless: Train
) -> bool:
    """Compare every version with one device that does the same; print bytes and the effect of the memory.

    memoryless: the training loop of our versions without their memory.
    """
    mesh = Mesh(rt.world, dp=rt.world_size)
    proof, same = Proof(mesh, DTYPES[o.dtype]), True
    whole = replace(o, k=1.0, rank=max(p.shape[0] for p in make_model(o, rt.device).parameters()))
    cases = [(name, name, o) for name in o.versions]
    cases += [(f"{name}, all", name, whole) for name in o.versions if name in ("top-k", "powersgd")]
    for optimizer in OPTIMIZERS:
        references: dict[str, Followed] = {}
        for label, name, given in cases:
            simulated = "bucketed" if given is whole else compressor_of(name)
            if simulated not in references:
                references[simulated] = on_one_device(simulated, optimizer, rt, given)
            model = make_model(replace(o, seed=o.seed + rt.rank), rt.device)  # the broadcast must mend this
            job = Job(rt, given, name, model, mesh, "dp", OPTIMIZERS[optimizer], o.steps)
            followed, ledger = on_ranks(lesson.versions[name], job, mesh)
            same = same and same_on_all_ranks(followed, rt.world)
            counted = None if name.startswith("torch") else ledger.bytes()
            formula = lesson.bytes_of_run(name, make_model(o, rt.device), rt.world, given)
            proof.add(label, optimizer, references[simulated], followed, counted, formula)
    out = console(rt)
    out.print(proof.tables(f"{rt.world_size} ranks, {o.model}, {o.dtype}, {o.steps} steps"))
    out.print(bytes_table(rt, o, lesson))
    stalls, table = stall(make_compressor, o)
    out.print(table)
    report(rt, replace(o, plot=None), proof.recorded(benchmark(rt, replace(o, steps=5), lesson)))
    if o.plot:
        curves(rt, o, lesson, memoryless)
    out.print(proof.sentence())
    out.print("every gradient and weight is the same on all ranks, bit by bit" if same else "ranks DIFFER")
    return proof.holds and same and stalls


def bytes_table(rt: Runtime, o: CompressionOptions, lesson: Lesson) -> Table:
    """Return a table of the bytes of a step's gradients, and of their ratio to an all-reduce."""
    table = Table(title="gradients of a step, bytes a rank", title_justify="left")
    for column in ("compressor", "bytes", "times less"):
        table.add_column(column, justify="left" if column == "compressor" else "right")
    model = make_model(o, rt.device)
    plain = sum((share(p, 2, rt.world) for p in model.parameters()), Fraction(0))
    for name in ("bucketed", *COMPRESSORS):
        less, bucketed = (lesson.step_bytes(one, model, rt.world, o) for one in (name, "bucketed"))
        sent = plain + less - bucketed
        table.add_row(name, show_bytes(sent), f"{float(plain / sent) if sent else 1:.1f}")
    return table


def curves(rt: Runtime, o: CompressionOptions, lesson: Lesson, memoryless: Train) -> None:
    """Train with each compressor, with and without memory; print and plot the losses."""
    mesh, losses = Mesh(rt.world, dp=rt.world_size), dict[str, list[float]]()
    table = Table(title=f"loss, mean of the last 10 of {o.curve_steps} steps, SGD", title_justify="left")
    for column in ("compressor", "with memory", "without"):
        table.add_column(column, justify="left" if column == "compressor" else "right")
    for name in ("bucketed", *COMPRESSORS):
        row = []
        for train in (lesson.versions[name], memoryless)[: 1 if name == "bucketed" else 2]:
            job = Job(rt, o, name, make_model(o, rt.device), mesh, "dp", OPTIMIZERS["sgd"], o.curve_steps)
            label = f"{name}, no memory" if train is memoryless else name
            losses[label] = [loss.item() for loss in train(job)]
            row.append(f"{sum(losses[label][-10:]) / 10:.3f}")
        table.add_row(name, *row)
    console(rt).print(table)
    if rt.rank == 0 and o.plot:
        with figure(o.plot, width=7.5, height=4.2) as (axes,):
            title = f"{o.model}, {rt.world_size} ranks, SGD, mean of 10 steps"
            loss_curves(axes, losses, title=title, mean=10)
