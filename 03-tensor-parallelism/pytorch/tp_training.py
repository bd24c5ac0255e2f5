"""Shared code of the lessons of chapter 03: their options, and the group of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.table import Table

from common.comm import Group
from common.comm.mesh import Mesh
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, check, prove, time_in_turn
from common.lesson.runner import console
from common.lesson.training import TrainingOptions


@dataclass
class TensorOptions(TrainingOptions):
    """Model and batch of the lessons of chapter 03."""

    micro_batches: Size = 1
    """Number of micro-batches into which the samples are cut to accumulate gradients."""


def tp_group(rt: Runtime) -> Group:
    """Return the group of all ranks, along tp."""
    return Mesh(rt.world, tp=rt.world_size).group("tp")


def lesson(rt: Runtime, o: TensorOptions, proved: Lesson, first: Callable[[], bool] = lambda: True) -> bool:
    """Run `first`, then prove every version; with --benchmark only time the versions."""
    check(rt, tuple(proved.versions), o)
    if o.benchmark:
        return time_in_turn(rt, o, proved)
    right = first()
    return prove(rt, o, proved) and right


def show(rt: Runtime, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table on rank 0: its first column to the left, the others to the right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console(rt).print(table)
