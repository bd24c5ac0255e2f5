"""What the lessons of chapter 01 share: the size of a bucket, and the bytes of a step by formula."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from torch import nn

from common.comm import Group
from common.comparison import check as check
from common.options import Within
from common.training import TrainingOptions


@dataclass
class DataParallelOptions(TrainingOptions):
    """Model and batch of the lessons of chapter 01."""

    bucket_mb: Annotated[float, Within(1e-6, 1e6)] = 0.1
    """Size of a bucket in MiB."""
    versions: tuple[str, ...] = ("naive", "bucketed", "ddp")
    """Which versions to run."""


def bytes_of_step(model: nn.Module, group: Group, flags: bool = True) -> Fraction:
    """Bytes a rank sends in a step, 2(n-1)/n of: gradients, a flag a parameter, the loss, the targets (8).

    DDP sends no flags.
    """
    parameters = list(model.parameters())
    numbers = sum(p.numel() for p in parameters) + flags * len(parameters) + 1
    return Fraction(2 * (group.size - 1) * (numbers * parameters[0].element_size() + 8), group.size)


def bytes_of_run(model: nn.Module, group: Group, steps: int, order: bool, flags: bool = True) -> Fraction:
    """Bytes a rank sends in a whole run.

    At the start (n-1)/n of the model and, with `order`, of 8 bytes a parameter for the order of the buckets;
    then the steps, each with the 8 bytes of its gradient norm, all-reduced.
    """
    parameters = list(model.parameters())
    start = sum(p.numel() * p.element_size() for p in parameters) + order * 8 * len(parameters)
    norms = Fraction(2 * (group.size - 1) * 8, group.size)
    return Fraction((group.size - 1) * start, group.size) + steps * (
        bytes_of_step(model, group, flags) + norms
    )
