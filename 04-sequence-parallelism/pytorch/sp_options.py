"""Options of the lessons of chapter 04."""

from __future__ import annotations

from dataclasses import dataclass

from common.launch.command_line import Count, Size
from common.lesson.training import TrainingOptions

from sp_block import Kernel


@dataclass
class SequenceOptions(TrainingOptions, without=("scaling",)):
    """Model and batch of the lessons of chapter 04."""

    batch: Size = 3
    """Samples of the global batch; every rank has a piece of each."""
    sequence: Size = 48
    """Tokens of a sample, all ranks together."""
    kernel: Kernel = "library"
    """Kernel for a block of attention: `hand`, written in sp_block.py, or `library`, torch's for CPUs."""
    shape: tuple[Size, Size, Size] = (8192, 8, 64)
    """Tokens, heads and width of a head of the attention that --benchmark times alone."""


@dataclass
class GridOptions(SequenceOptions):
    """Options of ranks in a grid."""

    inner: Count = 2
    """Ranks per row, which swap tokens for heads; the ranks of a column form a ring."""
