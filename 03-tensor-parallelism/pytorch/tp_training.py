"""Shared code of the lessons of chapter 03: their options, and the group of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from common.comm import Group
from common.comm.mesh import Mesh
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, check, prove, time_in_turn
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
