"""Options of the lessons of chapter 01."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

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
