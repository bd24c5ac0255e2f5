"""The picture of plan.py: plans' time by what takes it, their memory, and the first one's schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from matplotlib.axes import Axes

from common.utils.visualizer import Interval, colour, figure, timeline

from plan_job import Job
from plan_memory import Memory
from plan_search import GIB, Choice
from plan_show import parts
from plan_stage import stages
from plan_time import timeline as simulated

ROWS = 16  # ranks and micro-batches of the timeline, at most


def draw(job: Job, best: Sequence[Choice], path: Path) -> None:
    """Write the picture of the best plans."""
    height = 2.2 + 0.35 * len(best)
    with figure(path, rows=3, width=12, height=2 * height + 3) as (times, sizes, schedule):
        bars(times, {str(choice.plan): parts(choice) for choice in best}, "seconds per step")
        held = {
            str(choice.plan): {f.name: getattr(choice.memory, f.name) / GIB for f in fields(Memory)}
            for choice in best
        }
        bars(sizes, held, "GiB of the fullest rank")
        room = (job.machine.memory - job.machine.reserved) / GIB
        sizes.axvline(room, color="black", linestyle="--", linewidth=1)
        sizes.set_xlabel(f"GiB of the fullest rank; the line is {job.machine.name}")
        pipeline(job, best[0], schedule)


def bars(axes: Axes, rows: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Draw a stacked bar per row: row -> part -> value."""
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind in row))
    for y, row in enumerate(rows.values()):
        left = 0.0
        for kind, value in row.items():
            axes.barh(y, value, left=left, height=0.7, color=colour(kinds.index(kind)))
            left += value
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)
    for place, kind in enumerate(kinds):
        axes.barh(0, 0, color=colour(place), label=kind)
    axes.legend(loc="lower center", bbox_to_anchor=(0.3, 1.0), ncols=len(kinds), fontsize=8)


def pipeline(job: Job, choice: Choice, axes: Axes) -> None:
    """Draw the schedule's beginning: the first ranks and micro-batches."""
    plan, M = choice.plan, min(ROWS, choice.plan.micro_batches(job.batch))
    rows: dict[str, list[Interval]] = {f"rank {rank}": [] for rank in range(min(ROWS, plan.pp))}
    for event in simulated(plan, M, stages(job, plan)).events:
        if event.rank < len(rows):
            i = event.instruction
            rows[f"rank {event.rank}"].append(Interval(float(event.start), float(event.end), i.op))
    timeline(
        axes, rows, kinds=("F", "B", "I", "W"), title=f"the schedule of the first plan with {M} micro-batches"
    )
