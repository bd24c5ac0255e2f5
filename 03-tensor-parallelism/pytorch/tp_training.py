"""What the lessons of chapter 03 share: their options, the group of all ranks, the bytes of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from common.comm import Group
from common.comparison import Formula, benchmark, check, prove, report
from common.mesh import Mesh
from common.options import Size
from common.runtime import Runtime
from common.training import TrainingOptions, Version


@dataclass
class TensorOptions(TrainingOptions):
    """Model and batch of the lessons of chapter 03."""

    micro_batches: Size = 1
    """Parts into which the samples are cut to accumulate gradients."""


def tp_group(rt: Runtime) -> Group:
    """All ranks, along tp."""
    return Mesh(rt.world, tp=rt.world_size).group("tp")


def run_bytes(step_bytes: Formula) -> Formula:
    """Bytes a rank sends in `o.steps` steps, each with the 8 bytes of its gradient norm, all-reduced."""

    def formula(name: str, model: nn.Module, group: Group, o: Any) -> Fraction:
        norm = Fraction(2 * (group.size - 1) * 8, group.size)
        total: Fraction = o.steps * (step_bytes(name, model, group, o) + norm)
        return total

    return formula


def lesson(
    rt: Runtime,
    o: TensorOptions,
    known: tuple[str, ...],
    make_version: Callable[..., Version],
    step_bytes: Formula,
    first: Callable[[], bool] = lambda: True,
    unseen: tuple[str, ...] = (),
) -> bool:
    """`first`, then the proof of every version; with --benchmark their times alone.

    unseen: versions whose messages pass the ledger by.
    """
    check(rt, known, o)
    if o.benchmark:
        report(rt, o, benchmark(rt, o, make_version, step_bytes, unseen, axis="tp"))
        return True
    right = first()
    return prove(rt, o, make_version, run_bytes(step_bytes), step_bytes, unseen, axis="tp") and right
