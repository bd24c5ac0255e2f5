"""Proof of dp_compression.py: each version beside one device that compresses likewise; the effect of the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch
from rich.table import Table

from common import comm
from common.comm import Group, share
from common.comm.ledger import show_bytes
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.comparison import Lesson, benchmark, report
from common.lesson.equality import OPTIMIZERS, Followed, with_units
from common.lesson.job import Job, Train, one_device
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console
from common.lesson.training import make_model, shape_of
from common.utils.visualizer import INK, colour, figure

from dp_basic import Bucket
from dp_compression_simulated import train as train_simulated
from dp_compressor import COMPRESSORS, CompressionOptions, Compressor, compressor_of
from dp_training import joined, on_one_device, on_ranks

MakeCompressor = Callable[[str, Group, CompressionOptions, bool], Compressor]


def simulated(name: str, optimizer: str, rt: Runtime, o: CompressionOptions) -> Followed:
    """Train on one device, plainly or with a simulated compressor; return the result, with units."""
    plain = name == "bucketed"
    train, given = (one_device, replace(o, micro_batches=1)) if plain else (train_simulated, o)
    return with_units(partial(on_one_device, rt, given, train, name, optimizer))


def same_on_all_ranks(followed: Followed, group: Group) -> bool:
    """Return True if all gradients of all steps, and the last weights, are bitwise equal on all ranks."""
    mine = joined(t for tensors in (*followed.gradients, followed.weights) for t in tensors.values())
    low, high = mine.clone(), mine.clone()
    comm.all_reduce(low, group, "min")
    comm.all_reduce(high, group, "max")
    return torch.equal(low, high)


def quarrel(exchange: Compressor) -> float:
    """Return the second of two weights after 150 steps of SGD on one rank, with this exchange.

    The weights are trained on two kinds of samples. The gradients for the first weight, w₀ ± 4, are large and
    disagree; those for the second, w₁ - 1, are small and agree that it should be 1.
    """
    w = torch.zeros(2, dtype=torch.float64)
    for t in range(150):
        gradient = w + torch.tensor([4.0 if t % 2 else -4.0, -1.0])
        exchange(Bucket(gradient, {0: gradient})).wait()
        w -= 0.05 * gradient
    return w[1].item()


def stall(make_compressor: MakeCompressor, o: CompressionOptions) -> tuple[bool, Table]:
    """Return (True if the second weight converges with memory and stays at 0 without, a table)."""
    heads = (">", ">both sent", ">top-1 with memory", ">top-1 without")
    table = make_table("two weights, 150 steps", heads)
    weights = [
        quarrel(make_compressor("top-k", Group.alone(), replace(o, k=share), memory))
        for share, memory in ((1.0, True), (0.5, True), (0.5, False))
    ]
    table.add_row("the second, should be 1", *(f"{w:.3f}" for w in weights))
    return abs(weights[1] - 1) < 0.1 and weights[2] == 0, table


def prove_compression(
    rt: Runtime, o: CompressionOptions, lesson: Lesson, make_compressor: MakeCompressor, memoryless: Train
) -> bool:
    """Compare every version with one device that does the same; print bytes and the effect of the memory.

    memoryless: the training loop of our versions without their memory.
    """
    mesh = Mesh(rt.world, dp=rt.world_size)
    proof, same = Proof(mesh, DTYPES[o.dtype]), True
    whole = replace(o, k=1.0, rank=max(p.shape[0] for p in shape_of(o).parameters()))
    cases = [(name, name, o) for name in o.versions]
    cases += [(f"{name}, all", name, whole) for name in o.versions if name in ("top-k", "powersgd")]
    for optimizer in OPTIMIZERS:
        references: dict[str, Followed] = {}
        for label, name, given in cases:
            like = "bucketed" if given is whole else compressor_of(name)
            if like not in references:
                references[like] = simulated(like, optimizer, rt, given)
            followed, _, sent = on_ranks(rt, given, lesson.versions[name], name, optimizer, lesson.unseen)
            same = same and same_on_all_ranks(followed, rt.world)
            counted = None if name in lesson.unseen else sent
            formula = lesson.bytes_of_run(name, shape_of(o), rt.world, given)
            proof.add(label, optimizer, references[like], followed, counted, formula)
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
    table = make_table("gradients of a step, bytes a rank", ("compressor", ">bytes", ">times less"))
    model = shape_of(o)
    plain = sum((share(p, 2, rt.world) for p in model.parameters()), Fraction(0))
    for name in ("bucketed", *COMPRESSORS):
        less, bucketed = (lesson.step_bytes(one, model, rt.world, o) for one in (name, "bucketed"))
        sent = plain + less - bucketed
        table.add_row(name, show_bytes(sent), f"{float(plain / sent) if sent else 1:.1f}")
    return table


def curves(rt: Runtime, o: CompressionOptions, lesson: Lesson, memoryless: Train) -> None:
    """Train with each compressor, with and without memory; print and plot the losses."""
    mesh, losses = Mesh(rt.world, dp=rt.world_size), dict[str, list[float]]()
    title = f"loss, mean of the last 10 of {o.curve_steps} steps, SGD"
    table = make_table(title, ("compressor", ">with memory", ">without"))
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
        window = max(1, min(50, o.curve_steps // 4))
        with figure(o.plot, width=7.5, height=4.2) as (axes,):
            for place, name in enumerate(COMPRESSORS):
                for label, line in ((name, "-"), (f"{name}, no memory", ":")):
                    lag = [a - b for a, b in zip(losses[label], losses["bucketed"], strict=True)]
                    means = [sum(lag[i - window : i]) / window for i in range(window, len(lag) + 1)]
                    steps = range(window - 1, len(lag))
                    axes.plot(steps, means, line, color=colour(place), label=label)
            axes.axhline(0, color=INK, linewidth=1)
            axes.set(xlabel="step", ylabel="loss above the all-reduce's (nats a token)")
            axes.set_title(f"{o.model}, {rt.world_size} ranks, SGD, mean of {window} steps")
            axes.grid(axis="y")
            axes.legend(loc="upper right")
