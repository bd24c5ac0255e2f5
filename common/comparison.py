"""Versions of a strategy side by side: each against one device, then all in turn for time.

A lesson names its versions and gives their bytes by formula; `prove` and `benchmark` do the rest.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from rich.table import Table
from torch import nn

from common import comm
from common.comm import Group
from common.equality import OPTIMIZERS, Followed, Start, follow, with_units
from common.errors import UsageError
from common.ledger import Ledger
from common.lesson import DTYPES, console, write_records
from common.listen import Listener
from common.measure import BenchmarkRecord, Measured, in_turn, peak_memory
from common.mesh import Mesh
from common.models.transformer import Transformer
from common.placement import TOKEN_AXES
from common.proof import Proof
from common.runtime import Runtime
from common.training import Batches, TrainingOptions, Version, make_model, shape_of, training_step, whole_step
from common.utils.visualizer import figure, throughput_bars

Formula = Callable[[str, nn.Module, Group, Any], Fraction]  # version, model, group, the lesson's options


def one_rank(rt: Runtime) -> Group:
    """This rank alone."""
    return Group("one", 0, 1, (rt.rank,))


def split_tokens(rt: Runtime, axis: str) -> Group:
    """The ranks that see different tokens when all of the world lies along `axis`."""
    return rt.world if axis in TOKEN_AXES else one_rank(rt)


def benchmark(
    rt: Runtime,
    o: TrainingOptions,
    make_version: Callable[..., Version],
    step_bytes: Formula,
    unseen: Collection[str] = ("ddp",),
    make_batches: Callable[..., Batches] = Batches,
    axis: str = "dp",
) -> list[BenchmarkRecord]:
    """Whole steps, AdamW included, of every version in turn; `o.steps` rounds after one to warm up.

    step_bytes: the bytes a rank sends in a step by formula. unseen: versions whose messages and waits pass the
    ledger by. axis: the one along which the strategy splits.
    """
    weak = o.benchmark and o.scaling == "weak"
    o = replace(o, batch=o.batch * rt.world_size) if weak else o
    tokens = split_tokens(rt, axis)
    batches = make_batches(o, tokens, rt.device)
    cases: dict[str, Callable[[], object]] = {}
    for name in o.versions:
        model = make_model(o, rt.device)
        cases[name] = whole_step(make_version(name, model, rt, o), batches, tokens)
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    plain = shape_of(o)
    formula = {name: step_bytes(name, plain, rt.world, o) for name in measured}
    return records(rt, o, measured, plain, formula, unseen, axis=axis)


def records(
    rt: Runtime,
    o: TrainingOptions,
    measured: Mapping[str, Measured],
    model: nn.Module,
    step_bytes: Mapping[str, Fraction | int],
    unseen: Collection[str] = (),
    steps: int = 1,
    axis: str = "dp",
) -> list[BenchmarkRecord]:
    """What was measured, a record a version. A round was `steps` steps; the records are of one."""
    assert isinstance(model, Transformer)
    tokens, memory = o.batch * o.sequence, peak_memory(rt.world)
    waits = comm.everyones({name: m.by_axis for name, m in measured.items()}, rt.world)
    return [
        BenchmarkRecord(
            strategy=axis,
            implementation=name,
            language="pytorch",
            ranks=rt.world_size,
            backend=rt.backend,
            dtype=o.dtype,
            model=o.model,
            parameters=model.parameter_count(),
            tokens_per_step=tokens,
            flop_per_step=tokens * model.flops_per_token(o.sequence),
            step_seconds=[seconds / steps for seconds in m.seconds],
            communication_seconds=None if name in unseen else statistics.median(m.blocked) / steps,
            bytes_counted=None if name in unseen else statistics.median(m.sent) / steps,
            bytes_formula=float(step_bytes[name]),
            peak_memory_bytes=memory,
            scaling=o.scaling,
            seconds_by_axis=None if name in unseen else mean_by_axis([of[name] for of in waits], steps),
        )
        for name, m in measured.items()
    ]


def mean_by_axis(ranks: list[list[dict[str, float]]], steps: int) -> dict[str, float]:
    """Of rounds of ranks: the median of each axis on each rank, averaged over the ranks, a step."""
    axes = sorted({axis for rounds in ranks for round in rounds for axis in round})
    return {
        axis: statistics.mean(statistics.median(round.get(axis, 0.0) for round in rounds) for rounds in ranks)
        / steps
        for axis in axes
    }


def timing_table(records: list[BenchmarkRecord]) -> Table:
    """Median step time of each version, its spread, the share blocked in communication, and the speed."""
    first = records[0]
    title = (
        f"a step in turn: {first.model}, {first.dtype}, {first.ranks} ranks, {first.tokens_per_step:,} tokens"
    )
    table = Table(title=title, title_justify="left")
    for column in ("version", "ms (median)", "spread", "blocked in communication", "tokens/s", "GFLOP/s"):
        table.add_column(column, justify="left" if column == "version" else "right")
    for r in records:
        median = statistics.median(r.step_seconds)
        spread = (max(r.step_seconds) - min(r.step_seconds)) / median
        blocked = "-" if r.communication_seconds is None else f"{r.communication_seconds / median:.1%}"
        speed = (f"{r.tokens_per_step / median:,.0f}", f"{r.flop_per_step / median / 1e9:.1f}")
        table.add_row(r.implementation, f"{median * 1e3:.1f}", f"{spread:.0%}", blocked, *speed)
    return table


def report(rt: Runtime, o: TrainingOptions, records: list[BenchmarkRecord]) -> None:
    """On rank 0: the table, the records of --json, the picture of --plot."""
    console(rt).print(timing_table(records))
    if rt.rank == 0:
        write_records(o.json, [r.as_json() for r in records])
        if o.plot:
            speeds = {
                r.implementation: {r.ranks: r.tokens_per_step / statistics.median(r.step_seconds)}
                for r in records
            }
            with figure(o.plot) as (axes,):
                throughput_bars(axes, speeds, unit="tokens/s", title=f"{o.model}, {o.dtype}")


Examine = Callable[[str, str, Version, torch.optim.Optimizer], None]


def prove(
    rt: Runtime,
    o: TrainingOptions,
    make_version: Callable[..., Version],
    run_bytes: Formula,
    step_bytes: Formula,
    unseen: Collection[str] = ("ddp",),
    examine: Examine = lambda name, optimizer, version, made: None,
    make_batches: Callable[..., Batches] = Batches,
    one_device: Callable[[str, nn.Module, Any], Version] | None = None,
    axis: str = "dp",
) -> bool:
    """Train with every version and optimizer, on all ranks and on one; show what differs and what it took.

    run_bytes, step_bytes: the bytes a rank sends in a run and in a step by formula. unseen: versions whose
    messages pass the ledger by. examine: sees each version after its last step, and its optimizer.
    one_device: what a version is compared with, where that is more than the plain model. axis: the one along
    which the strategy splits.
    """
    mesh, tokens, alone = Mesh(rt.world, **{axis: rt.world_size}), split_tokens(rt, axis), one_rank(rt)
    proof, ledgers = Proof(DTYPES[o.dtype]), {}

    def on_one_device(start: Start) -> Followed:
        model = start(make_model(o, rt.device))
        version = one_device(name, model, o) if one_device else Version(model)
        step = training_step(version, make_batches(replace(o, micro_batches=1), alone, rt.device), alone)
        return follow(model, optimizer, o.steps, step, wrap=version.wrap)

    for optimizer in OPTIMIZERS:
        references: dict[str, Followed] = {}
        for name in o.versions:
            compared = name if one_device else "plain"
            if compared not in references:
                references[compared] = with_units(on_one_device)
            # replicas begin apart, which their broadcast must mend; pieces come from the same model
            own = o.seed + mesh.at["dp"]
            model = make_model(replace(o, seed=own), rt.device)
            # what passes the ledger by, the library's dispatcher sees
            with Listener(rt.world) if name in unseen else Ledger() as ledger:
                version = make_version(name, model, rt, o)
                step = training_step(version, make_batches(o, tokens, rt.device), tokens)
                owner = version.owner or model
                followed = follow(owner, optimizer, o.steps, step, mesh, version.wrap)
            formula = run_bytes(name, shape_of(o), rt.world, o)
            counted = ledger.bytes() - ledger.bytes("bookkeeping")
            proof.add(name, optimizer, references[compared], followed, mesh, counted, formula)
            ledgers[name] = ledger
            examine(name, optimizer, version, followed.optimizer)
    proof.gather(rt.world)
    out = console(rt)
    out.print(proof.tables(f"{rt.world_size} ranks, {o.model}, {o.dtype}, {o.steps} steps"))
    shown = next((name for name in reversed(o.versions) if name not in unseen), o.versions[0])
    out.print(ledgers[shown].table(f"{shown}, {optimizer}: calls and seconds of rank 0, bytes mean"))
    records = benchmark(rt, replace(o, steps=5), make_version, step_bytes, unseen, make_batches, axis)
    report(rt, o, proof.recorded(records))
    out.print(proof.sentence())
    return proof.holds


def check(rt: Runtime, known: tuple[str, ...], o: TrainingOptions) -> None:
    """Refuse what cannot run, before any rank waits for another."""
    for name in o.versions:
        if name not in known:
            raise UsageError(f"--versions {name!r} is unknown; choose from {', '.join(known)}")
    if not o.versions:
        raise UsageError(f"--versions is empty; choose from {', '.join(known)}")
