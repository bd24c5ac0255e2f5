"""Shared parts of the worked examples `*_by_hand.py`: their options, the check of their ranks, their verdict.

They compute in float32, whose integers below 2^24 and halves are exact, so a rank's tensor equals one device's or the
lesson is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.runner import LessonOptions, console


@dataclass
class ByHandOptions(LessonOptions, without=("steps", "seed", "dtype", "device", "data", "json", "plot")):
    """Options of a worked example."""

    check_all: ClassVar[bool] = True


def need_two_ranks(rt: Runtime) -> None:
    """Check the number of ranks. Raises UsageError."""
    if rt.world_size != 2:
        raise UsageError(f"{rt.world_size} rank(s): this example is for 2; give --nproc 2")


def verdict(rt: Runtime, pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Print whether the tensors of each pair, this rank's and one device's, are equal; return it."""
    equal = all(torch.equal(mine, right) for mine, right in pairs)
    console(rt).print(f"{'proved: equal to' if equal else 'DIFFERENT from'} one device, number by number")
    return equal
