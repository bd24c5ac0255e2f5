"""Gradient compression: each rank sends an approximate gradient, and adds the error to its next gradient.

    x = g + e        message = compress(x)        e = x - decompress(message)        for the optimizer: sum over ranks

    rank 0    gradient + memory ─ compress ─┐                  ┌─ gradient of the step, the same on all ranks
                         └ left out: memory │    all-gather    │
                                            ├───────or─────────┤
    rank 1    gradient + memory ─ compress ─┘    all-reduce    └─ so the weights stay the same on all ranks
                         └ left out: memory

Without the memory e ("error feedback") small components are never sent; with e they are sent in later steps.
Memory: one more gradient per rank. Bytes a rank sends in a step, for N numbers of b bytes in P
parameters, on n ranks:

    all-reduce   2(n-1)/n b N                 as in dp_basic.py
    top-k        (n-1) k (b + 4)              k numbers and their indices: all-gathers, which grow with n
    powersgd     2(n-1)/n b (r (A+B) + V)     factors A×r, B×r of each A×B matrix; V numbers outside matrices
    sign         (n-1) (N/8 + b P)            1 bit per number, packed, 1 scale per parameter: all-gathers

    python dp_compression.py --nproc 4    torchrun --nproc_per_node=4 dp_compression.py
    mpirun -np 4 python dp_compression.py            with --plot curves.png: the loss of each, with and without memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import comm
from common.comm import Group, share
from common.comm.ledger import Ledger, show_bytes
from common.comm.mesh import Mesh
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, benchmark, by_version, report
from common.lesson.equality import OPTIMIZERS, Followed, Start, follow, with_units
from common.lesson.measure import BenchmarkRecord
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console, run
from common.lesson.training import Batches, Version, make_model, training_step
from common.utils.visualizer import figure, loss_curves

from dp_basic import DataParallel
from dp_compression_simulated import Compression, Simulation, powersgd, signs, simulated_step, top_k
from dp_compressors import Compressor, PowerSGD, Sign, TopK, ddp_hook, joined, torch_hook
from dp_training import DataParallelOptions, bytes_of_run, bytes_of_step, check

COMPRESSORS = ("top-k", "powersgd", "sign")
VERSIONS = ("bucketed", *COMPRESSORS, "ddp-top-k", "ddp-powersgd", "ddp-sign", "torch-powersgd")


@dataclass
class CompressionOptions(DataParallelOptions):
    """Options of the compressors."""

    k: Annotated[float, Within(1e-9, 1)] = 0.05
    """Fraction of the numbers that top-k sends."""
    rank: Annotated[int, Within(1, 65536)] = 2
    """Rank of PowerSGD's factors."""
    curve_steps: Annotated[int, Within(10, 10**9)] = 100
    """With --plot: number of steps of the loss curves."""
    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""


def make_compressor(name: str, group: Group, o: CompressionOptions, feedback: bool = True) -> Compressor:
    """Return the compressor `name`, one of COMPRESSORS."""
    if name == "top-k":
        return TopK(group, o.k, feedback)
    return Sign(group, feedback) if name == "sign" else PowerSGD(group, o.rank, feedback)


def make_version(
    name: str, model: nn.Module, rt: Runtime, o: CompressionOptions, feedback: bool = True
) -> Version:
    """Return `model` under our DataParallel, or under DDP if `name` begins with ddp or torch."""
    if not name.startswith(("ddp", "torch")):
        exchange = None if name == "bucketed" else make_compressor(name, rt.world, o, feedback)
        dp = DataParallel(model, rt.world, o.bucket_mb, exchange)
        return Version(model, dp.no_sync, dp.finish)
    parameters = list(model.parameters())
    # torch's hook sends Q from a callback when P has arrived: with several buckets, order differs by rank
    cap = 1e6 if name.startswith("torch") else o.bucket_mb
    ddp = DistributedDataParallel(model, process_group=rt.world.pg, bucket_cap_mb=cap)
    if name.startswith("torch"):
        ddp.register_comm_hook(None, torch_hook(rt.world, o.rank, parameters))
        return Version(ddp, ddp.no_sync, averages=True)
    ddp.register_comm_hook(None, ddp_hook(make_compressor(compressor_of(name), rt.world, o), parameters))
    return Version(ddp, ddp.no_sync)


def compressor_of(name: str) -> str:
    """Return the compressor of a version: one of COMPRESSORS, or bucketed."""
    return name.removeprefix("ddp-").removeprefix("torch-")


def bytes_of_gradients(
    name: str, model: nn.Module, group: Group, o: CompressionOptions
) -> tuple[Fraction, Fraction]:
    """Return the bytes a rank sends for a step's gradients: (by all-reduce, by this version)."""
    parameters = list(model.parameters())
    plain = sum((share(p, 2, group) for p in parameters), Fraction(0))
    if name == "bucketed":
        return plain, plain
    return plain, make_compressor(compressor_of(name), group, o).bytes_of_step(parameters)


def bytes_formula(name: str, model: nn.Module, group: Group, o: CompressionOptions) -> Fraction:
    """Return the bytes a rank sends in a run. DDP has no flags, and its broadcast is not counted."""
    ours = not name.startswith(("ddp", "torch"))
    plain, sent = bytes_of_gradients(name, model, group, o)
    started = sum((share(p, 1, group) for p in model.parameters()), Fraction(0))
    run = bytes_of_run(model, group, o.steps, order=ours, flags=ours)
    return run + o.steps * (sent - plain) - (0 if ours else started)


def one_device(name: str, optimizer: str, rt: Runtime, o: CompressionOptions) -> Followed:
    """Train on one device, plainly or with a simulated compressor; return the result, with units."""
    return with_units(partial(_one_device, name, optimizer, rt, o))


def _one_device(name: str, optimizer: str, rt: Runtime, o: CompressionOptions, start: Start) -> Followed:
    model, alone = start(make_model(o, rt.device)), Group.alone()
    if name == "bucketed":
        batches = Batches(replace(o, micro_batches=1), alone, rt.device)
        return follow(model, optimizer, o.steps, training_step(Version(model), batches, alone))
    made: dict[str, Callable[[], Compression]] = {
        "top-k": partial(top_k, o.k),
        "sign": signs,
        "powersgd": partial(powersgd, o.rank),
    }
    simulation = Simulation(made[name]())
    return follow(model, optimizer, o.steps, simulated_step(model, simulation, o, rt.world_size, rt.device))


def on_ranks(name: str, optimizer: str, rt: Runtime, o: CompressionOptions) -> tuple[Followed, Ledger]:
    """Train on all ranks; return (the results, the ledger of the bytes sent)."""
    model = make_model(replace(o, seed=o.seed + rt.rank), rt.device)  # the broadcast must mend this
    batches = Batches(o, rt.world, rt.device)
    with Ledger() as ledger:
        version = make_version(name, model, rt, o)
        step = training_step(version, batches, rt.world)
    if name.startswith("torch"):
        for t in range(2):  # DDP cuts its buckets anew, so the hook starts in the third backward pass
            step(t)
    with ledger:
        return follow(model, optimizer, o.steps, step, Mesh(rt.world, dp=rt.world_size)), ledger


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


def quarrel(share: float, feedback: bool) -> float:
    """Return the second weight after 150 steps of SGD with top-k, on one rank. share: fraction sent."""
    model, alone = Quarrel(), Group.alone()
    dp = DataParallel(model, alone, exchange=TopK(alone, share, feedback))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for t in range(150):
        optimizer.zero_grad()
        model(t).backward()
        dp.finish()
        optimizer.step()
    return model.w[1].item()


def stall() -> tuple[bool, Table]:
    """Return (True if the second weight converges with memory and stays at 0 without, a table)."""
    table = Table(title="two weights, 150 steps", title_justify="left")
    for column in ("", "both sent", "top-1 with memory", "top-1 without"):
        table.add_column(column, justify="right")
    weights = quarrel(1.0, True), quarrel(0.5, True), quarrel(0.5, False)
    table.add_row("the second, should be 1", *(f"{w:.3f}" for w in weights))
    return abs(weights[1] - 1) < 0.1 and weights[2] == 0, table


def prove(rt: Runtime, o: CompressionOptions) -> bool:
    """Compare every version with one device that does the same; print bytes and the effect of the memory."""
    mesh, proof, same = Mesh(rt.world, dp=rt.world_size), Proof(DTYPES[o.dtype]), True
    whole = replace(o, k=1.0, rank=max(p.shape[0] for p in make_model(o, rt.device).parameters()))
    cases = [(name, name, o) for name in o.versions]
    cases += [(f"{name}, all", name, whole) for name in o.versions if name in ("top-k", "powersgd")]
    for optimizer in OPTIMIZERS:
        references: dict[str, Followed] = {}
        for label, name, given in cases:
            simulated = "bucketed" if given is whole else compressor_of(name)
            if simulated not in references:
                references[simulated] = one_device(simulated, optimizer, rt, given)
            followed, ledger = on_ranks(name, optimizer, rt, given)
            same = same and same_on_all_ranks(followed, rt.world)
            counted = None if name.startswith("torch") else ledger.bytes()
            formula = bytes_formula(name, make_model(o, rt.device), rt.world, given)
            proof.add(label, optimizer, references[simulated], followed, mesh, counted, formula)
    out = console(rt)
    out.print(proof.tables(f"{rt.world_size} ranks, {o.model}, {o.dtype}, {o.steps} steps"))
    out.print(bytes_table(rt, o))
    stalls, table = stall()
    out.print(table)
    report(rt, replace(o, plot=None), proof.recorded(timed(rt, replace(o, steps=5))))
    if o.plot:
        curves(rt, o)
    out.print(proof.sentence())
    out.print("every gradient and weight is the same on all ranks, bit by bit" if same else "ranks DIFFER")
    return proof.holds and same and stalls


def bytes_table(rt: Runtime, o: CompressionOptions) -> Table:
    """Return a table of the bytes of a step's gradients, and of their ratio to an all-reduce."""
    table = Table(title="gradients of a step, bytes a rank", title_justify="left")
    for column in ("compressor", "bytes", "times less"):
        table.add_column(column, justify="left" if column == "compressor" else "right")
    for name in ("bucketed", *COMPRESSORS):
        plain, sent = bytes_of_gradients(name, make_model(o, rt.device), rt.world, o)
        table.add_row(name, show_bytes(sent), f"{float(plain / sent) if sent else 1:.1f}")
    return table


def timed(rt: Runtime, o: CompressionOptions) -> list[BenchmarkRecord]:
    """Time whole steps of every version in turn."""
    return benchmark(
        rt,
        o,
        Lesson(
            "dp", dict.fromkeys(o.versions, by_version(make_version)), step_bytes, unseen=("torch-powersgd",)
        ),
    )


def step_bytes(name: str, model: nn.Module, group: Group, o: CompressionOptions) -> Fraction:
    """Return the bytes a rank sends in a step."""
    plain, sent = bytes_of_gradients(name, model, group, o)
    return bytes_of_step(model, group, flags=not name.startswith(("ddp", "torch"))) - plain + sent


def curves(rt: Runtime, o: CompressionOptions) -> None:
    """Train with each compressor, with and without memory; print and plot the losses."""
    batches, losses = Batches(o, rt.world, rt.device), dict[str, list[float]]()
    table = Table(title=f"loss, mean of the last 10 of {o.curve_steps} steps, SGD", title_justify="left")
    for column in ("compressor", "with memory", "without"):
        table.add_column(column, justify="left" if column == "compressor" else "right")
    for name in ("bucketed", *COMPRESSORS):
        row = []
        for feedback in (True, False)[: 1 if name == "bucketed" else 2]:
            model = make_model(o, rt.device)
            version = make_version(name, model, rt, o, feedback)
            step = training_step(version, batches, rt.world)
            label = name if feedback else f"{name}, no memory"
            losses[label] = follow(model, "sgd", o.curve_steps, step).losses
            row.append(f"{sum(losses[label][-10:]) / 10:.3f}")
        table.add_row(name, *row)
    console(rt).print(table)
    if rt.rank == 0 and o.plot:
        with figure(o.plot, width=7.5, height=4.2) as (axes,):
            title = f"{o.model}, {rt.world_size} ranks, SGD, mean of 10 steps"
            loss_curves(axes, losses, title=title, mean=10)


def main(rt: Runtime, o: CompressionOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, VERSIONS, o)
    # DDP needs a process group; torch's hook waits in a callback, where the one thread of our MPI group is busy
    cannot = ("ddp", "torch") if rt.world_size == 1 else ("torch",) if rt.backend == "mpi" else ()
    kept = tuple(name for name in o.versions if not name.startswith(cannot))
    if kept != o.versions:
        left_out = ", ".join(name for name in o.versions if name not in kept)
        console(rt).print(f"left out on {rt.world_size} ranks with {rt.backend}: {left_out}")
    o = replace(o, versions=kept or ("bucketed",))
    if not o.benchmark:
        return prove(rt, o)
    report(rt, o, timed(rt, o))
    return True


if __name__ == "__main__":
    run(main, CompressionOptions)
