"""Matrices of dp_matrix_multiply.py: the splits of each, and the shard of it that a rank generates by itself.

M rows of A and C  K inner dimension  J columns of B and C; lower-case: a rank's part
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.comm import Group, sizes_of
from common.errors import UsageError
from common.launch.command_line import Count, Size
from common.lesson.matrices import Product
from common.lesson.runner import LessonOptions


@dataclass(frozen=True)
class Split:
    """Dimension along which each matrix is sharded; None: replicated on every rank."""

    a: int | None
    b: int | None
    c: int


SPLITS = {
    "rows": Split(0, None, 0),
    "columns": Split(None, 1, 1),
    "inner": Split(1, 0, 0),
    "gathered": Split(0, 0, 0),
}


@dataclass
class MatrixOptions(LessonOptions, without=("data",)):
    """Options of dp_matrix_multiply.py: sizes and splits."""

    steps: Count = 5
    """Timed rounds."""
    shape: tuple[Size, Size, Size] = (211, 190, 167)
    """Rows of A, inner dimension, columns of B."""
    splits: tuple[str, ...] = tuple(SPLITS)
    """Splits to run."""
    panels: Size = 1
    """Number of row panels in which `inner` is computed; one is sent while the next is computed."""
    gather: bool = False
    """Gather each result on rank 0, too."""
    benchmark: bool = False
    """Time each split beside one rank, beside its ceiling without communication, and beside the libraries."""

    def check(self) -> None:
        """Raise UsageError for splits that are unknown or missing."""
        for name in self.splits:
            if name not in SPLITS:
                raise UsageError(f"--splits {name!r} is unknown; choose from {', '.join(SPLITS)}")
        if not self.splits:
            raise UsageError(f"--splits is empty; choose from {', '.join(SPLITS)}")


class Factors(Product):
    """Matrices A, B and dC. Each rank generates its shards, and the blocks to check against, by itself."""

    def __init__(self, o: MatrixOptions, group: Group, device: torch.device) -> None:
        super().__init__(o.shape, o.dtype, o.seed, device)
        self.group = group

    def place(self, name: str, dim: int | None) -> tuple[slice, slice]:
        """Return (rows, columns) of this rank's shard of a matrix that is split along `dim`."""
        places = [slice(0, length) for length in self.shapes[name]]
        if dim is not None:
            sizes = sizes_of(self.shapes[name][dim], self.group.size)
            begin = sum(sizes[: self.group.rank])
            places[dim] = slice(begin, begin + sizes[self.group.rank])
        return places[0], places[1]

    def piece(self, name: str, dim: int | None) -> Tensor:
        """Return this rank's shard of A, B or dC."""
        return self.tensor(name, *self.place(name, dim))

    def difference(self, name: str, found: Tensor, dim: int | None, at_most: int | None = None) -> float:
        """Return max|found - numpy| / max|numpy| of this rank's shard, the largest of all ranks.

        at_most: compare only this many rows, evenly spread, where all would take too long.
        """
        return self.apart(name, found, *self.place(name, dim), self.group, at_most)
