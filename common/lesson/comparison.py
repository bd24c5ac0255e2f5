"""Lessons: a strategy's training loops, each compared with one device, then all timed in turn.

LESSON = Lesson("sp", {"allgather": train}, step_bytes)
prove(rt, o, LESSON)          # or time_in_turn(rt, o, LESSON)
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.checked.asked import blocks, if_asked
from common.comm.ledger import Ledger
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.launch.command_line import check_names
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.equality import OPTIMIZERS, Followed, MakeOptimizer, Start, watch, with_units
from common.lesson.job import Job, Train, one_device
from common.lesson.measure import BenchmarkRecord, Measured, in_turn, peak_memory, spread
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console, write_records
from common.lesson.training import (
    TrainingOptions,
    make_model,
    shape_of,
    timed_adamw,
)
from common.models.transformer import Transformer
from common.utils.visualizer import figure, throughput_bars

Formula = Callable[[str, Transformer, Group, Any], Fraction]  # version, model, group, the lesson's options


@dataclass(frozen=True)
class Lesson:
    """A strategy: the axis along which it splits, the training loop of each version, its bytes by formula."""

    axis: str
    versions: Mapping[str, Train]
    step_bytes: Formula
    """Bytes that a rank sends in a step."""
    start_bytes: Formula | None = None
    """Bytes that a rank sends before the first step."""
    run_bytes: Formula | None = None
    """Bytes of the whole run, where it is more than the start, equal steps and their gradient norms."""
    one_device: Train | None = None
    """Training loop to compare with, where it is not that of the plain model; it differs by version."""
    unseen: Collection[str] = ()
    """Versions whose messages and waits the ledger does not see."""
    on_rank_0: Collection[str] = ()
    """Versions whose results rank 0 alone has."""
    examine: Callable[[Job[Any], str], None] = lambda job, optimizer: None
    """Called after each proved run, with the name of its optimizer."""

    def bytes_of_run(self, name: str, model: Transformer, group: Group, o: TrainingOptions) -> Fraction:
        """Return the bytes that a rank sends in the run: its start, and steps with an all-reduced norm of 8 bytes."""
        if self.run_bytes:
            return self.run_bytes(name, model, group, o)
        norm = Fraction(2 * (group.size - 1) * 8, group.size)
        start = self.start_bytes(name, model, group, o) if self.start_bytes else Fraction(0)
        return start + o.steps * (self.step_bytes(name, model, group, o) + norm)


def benchmark(rt: Runtime, o: TrainingOptions, lesson: Lesson) -> list[BenchmarkRecord]:
    """Time whole steps, AdamW included, of every version in turn; `o.steps` rounds after one to warm up."""
    weak = o.benchmark and o.scaling == "weak"
    o = replace(o, batch=o.batch * rt.world_size) if weak else o
    mesh = Mesh(rt.world, **{lesson.axis: rt.world_size}, timeout=rt.timeout)
    cases: dict[str, Callable[[], object]] = {}
    model = make_model(o, rt.device)
    models = [copy.deepcopy(model) for _ in o.versions[1:]] + [model]
    for name, model in zip(o.versions, models, strict=True):
        job = Job(rt, o, name, model, mesh, lesson.axis, timed_adamw)
        cases[name] = partial(next, lesson.versions[name](job))
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    plain = shape_of(o)
    formula = {name: lesson.step_bytes(name, plain, rt.world, o) for name in measured}
    return records(rt, o, measured, formula, lesson.unseen, lesson.axis)


def records(
    rt: Runtime,
    o: TrainingOptions,
    measured: Mapping[str, Measured],
    step_bytes: Mapping[str, Fraction | int],
    unseen: Collection[str] = (),
    axis: str = "dp",
) -> list[BenchmarkRecord]:
    """Return one record per version; each measured round was a step."""
    model = shape_of(o)
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
            step_seconds=m.seconds,
            communication_seconds=None if name in unseen else statistics.median(m.blocked),
            bytes_counted=None if name in unseen else statistics.median(m.sent),
            bytes_formula=float(step_bytes[name]),
            peak_memory_bytes=memory,
            scaling=o.scaling,
            seconds_by_axis=None if name in unseen else mean_by_axis([of[name] for of in waits]),
        )
        for name, m in measured.items()
    ]


def mean_by_axis(ranks: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return the seconds per step along each axis: each rank's median over rounds, averaged over the ranks.

    ranks: for each rank, the rounds; for each round, seconds by axis.
    """
    axes = sorted({axis for rounds in ranks for round in rounds for axis in round})
    return {
        axis: statistics.mean(statistics.median(round.get(axis, 0.0) for round in rounds) for rounds in ranks)
        for axis in axes
    }


def timing_table(records: list[BenchmarkRecord]) -> Table:
    """Return a table of the versions: median step time, spread, share blocked in communication, speed."""
    first = records[0]
    title = (
        f"a step in turn: {first.model}, {first.dtype}, {first.ranks} ranks, {first.tokens_per_step:,} tokens"
    )
    numbers = (">ms (median)", ">spread", ">blocked in communication", ">tokens/s", ">GFLOP/s")
    table = make_table(title, ("version", *numbers))
    for r in records:
        median = statistics.median(r.step_seconds)
        blocked = "-" if r.communication_seconds is None else f"{r.communication_seconds / median:.1%}"
        speed = (f"{r.tokens_per_step / median:,.0f}", f"{r.flop_per_step / median / 1e9:.1f}")
        table.add_row(
            r.implementation, f"{median * 1e3:.1f}", f"{spread(r.step_seconds):.0%}", blocked, *speed
        )
    return table


def report(rt: Runtime, o: TrainingOptions, records: list[BenchmarkRecord]) -> None:
    """Print the table; on rank 0 write the records of --json and the picture of --plot."""
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


def prove(rt: Runtime, o: TrainingOptions, lesson: Lesson) -> bool:
    """Train with every version and optimizer, on all ranks and on one; show differences, bytes and times."""
    mesh = Mesh(rt.world, **{lesson.axis: rt.world_size}, timeout=rt.timeout)
    alone, proof, ledgers = Mesh(Group.alone()), Proof(mesh, DTYPES[o.dtype]), {}
    shape, plain = shape_of(o), make_model(o, rt.device)
    # replicas begin with different weights, to test their broadcast; shards come from one model
    begins = make_model(replace(o, seed=o.seed + mesh.at["dp"]), rt.device)

    def on_one_device(name: str, make: MakeOptimizer, start: Start) -> Followed:
        whole, model = replace(o, micro_batches=1), start(copy.deepcopy(plain))
        job = Job(rt, whole, name, model, alone, lesson.axis, make, o.steps)
        return watch((lesson.one_device or one_device)(job), job)

    for optimizer, make in OPTIMIZERS.items():
        references: dict[str, Followed] = {}
        for name in o.versions:
            compared = name if lesson.one_device else "plain"
            if compared not in references:
                references[compared] = with_units(partial(on_one_device, name, make))
            model = copy.deepcopy(begins)
            job = Job(rt, o, name, model, mesh, lesson.axis, make, o.steps)
            # messages that the ledger does not see go through the library's dispatcher
            with Listener(rt.world) if name in lesson.unseen else Ledger() as ledger:
                own = name in lesson.on_rank_0
                followed = watch(
                    lesson.versions[name](job), job, None if own else mesh, name not in lesson.unseen
                )
            formula = lesson.bytes_of_run(name, shape, rt.world, o)
            counted = ledger.bytes() - ledger.bytes("bookkeeping")
            shown = None if own and rt.rank > 0 else followed
            proof.add(name, optimizer, references[compared], shown, counted, formula)
            ledgers[name] = ledger
            lesson.examine(job, optimizer)
    proof.gather(rt.world)
    out = console(rt)
    out.print(proof.tables(f"{rt.world_size} ranks, {o.model}, {o.dtype}, {o.steps} steps"))
    seen = next((name for name in reversed(o.versions) if name not in lesson.unseen), o.versions[0])
    out.print(ledgers[seen].table(f"{seen}, {optimizer}: calls and seconds of rank 0, bytes mean"))
    report(rt, o, proof.recorded(benchmark(rt, replace(o, steps=5), lesson)))
    out.print(proof.sentence())
    return proof.holds


def time_in_turn(rt: Runtime, o: TrainingOptions, lesson: Lesson) -> bool:
    """Time the versions in turn and report, with --check the checker as well; True, since nothing is compared."""
    report(rt, o, benchmark(rt, o, lesson))
    if o.check:
        console(rt).print(cost_of_checks(rt, o, lesson))
    return True


def cost_of_checks(rt: Runtime, o: TrainingOptions, lesson: Lesson) -> Table:
    """Return a table of the versions whose messages we see: steps in turn, plain and under the checker.

    CPU: seconds that rank 0 computes, which do not depend on what else the machine does.
    """
    mesh = Mesh(rt.world, **{lesson.axis: rt.world_size}, timeout=rt.timeout)
    numbers = (">plain, ms", ">checked, ms", ">ratio (median)", ">ratio of CPU", ">least", ">most")
    title = f"a step, plain and checked, {o.steps} in turn; CPU and messages of rank 0"
    table = make_table(title, ("version", *numbers, ">messages", ">bytes"))

    def step(run: Iterator[Tensor], over: Mesh | None, cpu: list[float]) -> None:
        began = time.process_time()
        with if_asked(over):
            next(run)
        cpu.append(time.process_time() - began)

    for name in (name for name in o.versions if name not in (*lesson.unseen, *lesson.on_rank_0)):
        cases, cpu = dict[str, Callable[[], object]](), dict[str, list[float]]()
        for case, over in (("plain", None), ("checked", mesh)):
            job = Job(rt, o, name, make_model(o, rt.device), mesh, lesson.axis, timed_adamw)
            cpu[case] = []
            cases[case] = partial(step, lesson.versions[name](job), over, cpu[case])
        plain, checked = in_turn(cases, o.steps, rt.world, device=rt.device.type).values()
        ratio = statistics.median(b / a for a, b in zip(plain.seconds, checked.seconds, strict=True))
        of_cpu = [b / a for a, b in zip(cpu["plain"], cpu["checked"], strict=True)][1:]  # without the warm-up
        shown = (ratio, statistics.median(of_cpu), min(of_cpu), max(of_cpu))
        times, sent = (f"{1e3 * m.median:.1f}" for m in (plain, checked)), blocks[-1].meeting
        table.add_row(name, *times, *(f"{x:.1f}" for x in shown), f"{sent.messages:,}", f"{sent.bytes:,}")
    return table


def check(rt: Runtime, known: tuple[str, ...], o: TrainingOptions) -> None:
    """Check the names of the versions before any rank waits. Raises UsageError."""
    check_names("versions", o.versions, known)
