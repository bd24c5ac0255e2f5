"""Bubbles of schedules by formula, simulated and measured, and their timelines one above the other.

formula                of the schedule's docstring, for a forward, an I and a W that take the same time
simulated              the instruction list with these times
with measured times    the list with the time of each computation in this run, and messages that take none
measured               as the executor recorded: with messages, and its own work between computations
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from common import comm
from common.launch.runtime import Runtime
from common.lesson.job import Job
from common.lesson.runner import console, write_records
from common.lesson.training import TrainingOptions
from common.utils.visualizer import Interval, figure, timelines

from pp_checker import held
from pp_kind import Kind
from pp_schedule import COMPUTE, Schedule
from pp_simulator import Timeline, simulate

SHARES = ("formula", "simulated", "with measured times", "measured")


def waits(rt: Runtime, o: TrainingOptions, measured: Sequence[tuple[Kind, Schedule, Timeline]]) -> None:
    """Print each schedule's bubbles and the chunks that ranks hold; with --plot draw the last timelines."""
    title = f"{rt.world_size} ranks, {o.micro_batches} micro-batches: share of the time that is bubble"
    columns = (Column(name, justify="right") for name in (*SHARES, "chunks held by rank"))
    table, records = Table("schedule", *columns, title=title, title_justify="left"), []
    for kind, schedule, timeline in measured:
        took = {e.instruction: e.end - e.start for e in timeline.events}
        lines = {
            f"{schedule.name}, simulated with measured times": simulate(schedule, took.__getitem__),
            f"{schedule.name}, measured": timeline,
        }
        shares = (
            kind.bubble(schedule.ranks, schedule.micro_batches, schedule.stages // schedule.ranks),
            simulate(schedule).bubble,
            *(line.bubble for line in lines.values()),
        )
        found = [None if share is None else float(share) for share in shares]
        chunks = " ".join(str(held(schedule, rank)) for rank in range(schedule.ranks))
        table.add_row(schedule.name, *("-" if share is None else f"{share:.1%}" for share in found), chunks)
        records.append(
            {
                "schedule": schedule.name,
                "backend": rt.backend,
                "model": o.model,
                "dtype": o.dtype,
                "ranks": rt.world_size,
                "micro_batches": o.micro_batches,
                "bubble": dict(zip(SHARES, found, strict=True)),
                "timelines": {
                    key: {rank: [astuple(i) for i in row] for rank, row in rows(line).items()}
                    for key, line in lines.items()
                },
            }
        )
    console(rt).print(table)
    if rt.rank == 0:
        write_records(o.json, records)
        if o.plot:
            draw(o.plot, lines)


def measure(runs: Any, job: Job[Any], rounds: int = 3) -> Timeline:
    """Return the shortest timeline of `rounds` steps, after a warm-up. All ranks must be on one host.

    runs: an Executor, or the two stages of pp_manual.py: `run` does a step, and leaves its `events`.
    """
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
        f"rank {rank}": [
            Interval(float(e.start - begin), float(e.end - begin), e.instruction.op, str(e.instruction.micro))
            for e in line.events
            if e.rank == rank
        ]
        for rank in range(line.ranks)
    }
