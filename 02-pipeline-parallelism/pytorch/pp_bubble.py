"""What schedules wait: the bubble by formula, simulated and measured, and the timelines one above the other.

formula                of the schedule's docstring, for a forward, an I and a W that take the same time
simulated              the instruction list with these times
with measured times    the list with what each computation took in this run, and messages that take none
measured               what the executor noted: beside that messages, and its own work between two computations
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pp_checker import held
from pp_schedule import COMPUTE, Schedule
from pp_schedules import bubble
from pp_simulator import Event, Timeline, simulate
from rich.table import Table
from torch import Tensor

from common import comm
from common.comparison import one_rank
from common.lesson import console, write_records
from common.models.transformer import Transformer
from common.runtime import Runtime
from common.training import Batches, TrainingOptions, Version, make_model, training_step
from common.utils.visualizer import Interval, figure, timelines


class Runs(Protocol):
    """What Pipeline offers, and the two stages of pp_manual.py."""

    @property
    def events(self) -> list[Event]:
        """What this rank computed in the last run, and when."""

    def run(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Forward and backward of all micro-batches; the sum of their losses."""

    def finish(self) -> None:
        """After the backward passes."""


Make = Callable[[str, Transformer], Runs]


def waits(
    rt: Runtime, o: TrainingOptions, schedules: Sequence[Schedule], make: Make, batches: Batches
) -> None:
    """The bubble of each schedule, four times, and what ranks hold; with --plot the last one's timelines."""
    records = []
    for schedule in schedules:
        lines = beside(schedule, measure(partial(make, schedule.name), rt, o, batches))
        records.append(record(rt, o, schedule, lines))
    console(rt).print(table(schedules, records))
    if rt.rank == 0:
        write_records(o.json, records)
        if o.plot:
            draw(o.plot, lines)


def beside(schedule: Schedule, measured: Timeline) -> dict[str, Timeline]:
    """The measured timeline, below the one that the same times would give with messages that take none."""
    took = {e.instruction: e.end - e.start for e in measured.events}
    expected = simulate(schedule, took.__getitem__)
    return {
        f"{schedule.name}, simulated with measured times": expected,
        f"{schedule.name}, measured": measured,
    }


def record(
    rt: Runtime, o: TrainingOptions, schedule: Schedule, lines: Mapping[str, Timeline]
) -> dict[str, Any]:
    """What --json gets of one schedule."""
    chunks = schedule.stages // schedule.ranks
    expected, measured = lines.values()
    shares = {
        "formula": bubble(schedule.name, schedule.ranks, schedule.micro_batches, chunks),
        "simulated": simulate(schedule).bubble,
        "with measured times": expected.bubble,
        "measured": measured.bubble,
    }
    return {
        "schedule": schedule.name,
        "backend": rt.backend,
        "model": o.model,
        "dtype": o.dtype,
        "ranks": rt.world_size,
        "micro_batches": o.micro_batches,
        "bubble": {key: None if share is None else float(share) for key, share in shares.items()},
        "timelines": {
            key: {rank: [astuple(i) for i in row] for rank, row in rows(line).items()}
            for key, line in lines.items()
        },
    }


def table(schedules: Sequence[Schedule], records: Sequence[Mapping[str, Any]]) -> Table:
    """A row a schedule: its bubbles, and what ranks hold."""
    first = schedules[0]
    made = Table(
        title=f"{first.ranks} ranks, {first.micro_batches} micro-batches: share of the time that is bubble",
        title_justify="left",
    )
    made.add_column("schedule")
    for column in (*records[0]["bubble"], "chunks held by rank"):
        made.add_column(column, justify="right")
    for schedule, found in zip(schedules, records, strict=True):
        made.add_row(
            schedule.name,
            *("-" if share is None else f"{share:.1%}" for share in found["bubble"].values()),
            " ".join(str(held(schedule, rank)) for rank in range(schedule.ranks)),
        )
    return made


def measure(
    make: Callable[[Transformer], Runs], rt: Runtime, o: TrainingOptions, batches: Batches, rounds: int = 3
) -> Timeline:
    """The timeline of a training step, of `rounds` the shortest, after one to warm up. All ranks on one host."""
    runs = make(model := make_model(o, rt.device))
    step = training_step(Version(model, run=runs.run, finish=runs.finish), batches, one_rank(rt))
    lines = []
    for t in range(rounds + 1):
        comm.barrier(rt.world)
        step(t)
        everyones = comm.everyones(runs.events, rt.world)
        lines.append(Timeline(rt.world_size, tuple(event for events in everyones for event in events)))
    return min(lines[1:], key=lambda line: line.length)


def draw(path: Path, lines: Mapping[str, Timeline]) -> None:
    """Timelines, one above the other."""
    titled = {f"{name}: {float(line.bubble):.1%} bubble": rows(line) for name, line in lines.items()}
    ranks = max(line.ranks for line in lines.values())
    with figure(path, rows=len(lines), width=9.0, height=len(lines) * (1.1 + 0.3 * ranks)) as axes:
        timelines(axes, titled, unit="ms", scale=1e3, kinds=COMPUTE)


def rows(line: Timeline) -> dict[str, list[Interval]]:
    """What the visualizer draws: micro-batches as labels."""
    begin = min(e.start for e in line.events)
    return {
        f"rank {rank}": [interval(e, begin) for e in line.events if e.rank == rank]
        for rank in range(line.ranks)
    }


def interval(e: Event, begin: float | Fraction) -> Interval:
    """One computation."""
    return Interval(float(e.start - begin), float(e.end - begin), e.instruction.op, str(e.instruction.micro))
