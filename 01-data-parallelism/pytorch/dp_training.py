"""Shared parts of the lessons of chapter 01: bucket size, and the bytes of a step by formula."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from torch import nn

from common.comm import Group
from common.launch.command_line import Within
from common.lesson.comparison import check as check
from common.lesson.training import TrainingOptions


@dataclass
class DataParallelOptions(TrainingOptions):
    """Options of the lessons of chapter 01: model, batch and buckets."""

    bucket_mb: Annotated[float, Within(1e-6, 1e6)] = 0.1
    """Size of a bucket in MiB."""
    versions: tuple[str, ...] = ("naive", "bucketed", "ddp")
    """Versions to run."""


def bytes_of_step(model: nn.Module, group: Group, flags: bool = True) -> Fraction:
    """Return the bytes a rank sends in a step.

    They are 2(n-1)/n of: gradients, one flag per parameter (not in DDP), the loss, the targets (8 bytes).
    """
    parameters = list(model.parameters())
    numbers = sum(p.numel() for p in parameters) + flags * len(parameters) + 1
    return Fraction(2 * (group.size - 1) * (numbers * parameters[0].element_size() + 8), group.size)


def bytes_of_run(model: nn.Module, group: Group, steps: int, order: bool, flags: bool = True) -> Fraction:
    """Return the bytes a rank sends in a whole run.

    At the start these are (n-1)/n of the model and, with `order`, of 8 bytes per parameter for the order of
    the buckets; then come the steps, each with the 8 bytes of its gradient norm, all-reduced.
    """
    parameters = list(model.parameters())
    start = sum(p.numel() * p.element_size() for p in parameters) + order * 8 * len(parameters)
    norms = Fraction(2 * (group.size - 1) * 8, group.size)
    return Fraction((group.size - 1) * start, group.size) + steps * (
        bytes_of_step(model, group, flags) + norms
    )
