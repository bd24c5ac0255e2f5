"""Bubbles of schedules by formula, simulated and measured, and their timelines one above the other.

formula                of the schedule's docstring, for a forward, an I and a W that take the same time
simulated              the instruction list with these times
with measured times    the list with the time of each computation in this run, and messages that take none
measured               as the executor recorded: with messages, and its own work between computations
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table
from torch import Tensor

from common import comm
from common.launch.runtime import Runtime
from common.lesson.job import Job
from common.lesson.runner import console, write_records
from common.lesson.training import TrainingOptions
from common.utils.visualizer import Interval, figure, timelines

from pp_checker import held
from pp_kind import Kind
from pp_schedule import COMPUTE, Schedule
from pp_simulator import Event, Timeline, simulate


class Runs(Protocol):
    """Interface that Pipeline and the two stages of pp_manual.py share."""

    @property
    def events(self) -> list[Event]:
        """Computations of this rank in the last run, with their times."""

    def run(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of their losses."""


def waits(rt: Runtime, o: TrainingOptions, measured: Sequence[tuple[Kind, Schedule, Timeline]]) -> None:
    """Print each schedule's bubbles and the chunks that ranks hold; with --plot draw the last timelines."""
    records = []
    for kind, schedule, timeline in measured:
        lines = beside(schedule, timeline)
        records.append(record(rt, o, kind, schedule, lines))
    console(rt).print(table([schedule for _, schedule, _ in measured], records))
    if rt.rank == 0:
        write_records(o.json, records)
        if o.plot:
            draw(o.plot, lines)


def beside(schedule: Schedule, measured: Timeline) -> dict[str, Timeline]:
    """Return the timeline simulated with the measured times and instant messages, and the measured one."""
    took = {e.instruction: e.end - e.start for e in measured.events}
    expected = simulate(schedule, took.__getitem__)
    return {
        f"{schedule.name}, simulated with measured times": expected,
        f"{schedule.name}, measured": measured,
    }


def record(
    rt: Runtime, o: TrainingOptions, kind: Kind, schedule: Schedule, lines: Mapping[str, Timeline]
) -> dict[str, Any]:
    """Return the record of one schedule for --json."""
    chunks = schedule.stages // schedule.ranks
    expected, measured = lines.values()
    shares = {
        "formula": kind.bubble(schedule.ranks, schedule.micro_batches, chunks),
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
    """Return a table with one row per schedule: its bubbles, and the chunks that each rank holds."""
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


def measure(runs: Runs, job: Job[Any], rounds: int = 3) -> Timeline:
    """Return the shortest timeline of `rounds` steps, after a warm-up. All ranks must be on one host."""
    lines, world = [], job.rt.world
    for batch in itertools.islice(job.batches(), rounds + 1):
        comm.barrier(world)
        runs.run(batch.parts, 1 / batch.count_targets(), batch.begin)
        everyones = comm.everyones(runs.events, world)
        lines.append(Timeline(world.size, tuple(event for events in everyones for event in events)))
    return min(lines[1:], key=lambda line: line.length)


def draw(path: Path, lines: Mapping[str, Timeline]) -> None:
    """Draw timelines, one above the other."""
    titled = {f"{name}: {float(line.bubble):.1%} bubble": rows(line) for name, line in lines.items()}
    ranks = max(line.ranks for line in lines.values())
    with figure(path, rows=len(lines), width=9.0, height=len(lines) * (1.1 + 0.3 * ranks)) as axes:
        timelines(axes, titled, kinds=COMPUTE)


def rows(line: Timeline) -> dict[str, list[Interval]]:
    """Return the intervals of each rank for the visualizer, labelled with their micro-batches."""
    begin = min(e.start for e in line.events)
    return {
        f"rank {rank}": [interval(e, begin) for e in line.events if e.rank == rank]
        for rank in range(line.ranks)
    }


def interval(e: Event, begin: float | Fraction) -> Interval:
    """Return one computation as an interval of the visualizer."""
    return Interval(float(e.start - begin), float(e.end - begin), e.instruction.op, str(e.instruction.micro))
