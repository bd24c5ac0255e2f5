"""What dp_matrix_multiply.py multiplies: how each matrix is cut, and the piece of it that a rank makes alone.

M rows of A and C  K inner dimension  J columns of B and C; lower-case: a rank's part
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.comm import Group, sizes_of
from common.errors import UsageError
from common.lesson import LessonOptions
from common.options import Count, Size
from common.utils.matrices import Product


@dataclass(frozen=True)
class Split:
    """The dimension along which each matrix lies in pieces; None: every rank has the whole."""

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
    """Sizes and splits of dp_matrix_multiply.py."""

    steps: Count = 5
    """Rounds that are timed."""
    shape: tuple[Size, Size, Size] = (211, 190, 167)
    """Rows of A, inner dimension, columns of B."""
    splits: tuple[str, ...] = tuple(SPLITS)
    """Which splits to run."""
    panels: Size = 1
    """Panels of rows in which `inner` is computed; one travels while the next is computed."""
    gather: bool = False
    """Gather each result on rank 0, too."""
    benchmark: bool = False
    """Time each split beside one rank, beside its ceiling without communication, and beside the libraries."""

    def check(self) -> None:
        """Raises UsageError for what cannot run."""
        for name in self.splits:
            if name not in SPLITS:
                raise UsageError(f"--splits {name!r} is unknown; choose from {', '.join(SPLITS)}")
        if not self.splits:
            raise UsageError(f"--splits is empty; choose from {', '.join(SPLITS)}")


class Factors(Product):
    """A, B and dC by position: each rank makes what it holds, and what it needs to check itself, alone."""

    def __init__(self, o: MatrixOptions, group: Group, device: torch.device) -> None:
        super().__init__(o.shape, o.dtype, o.seed, device)
        self.group = group

    def place(self, name: str, dim: int | None) -> tuple[slice, slice]:
        """Rows and columns of this rank's piece of a matrix that is cut along `dim`."""
        places = [slice(0, length) for length in self.shapes[name]]
        if dim is not None:
            sizes = sizes_of(self.shapes[name][dim], self.group.size)
            begin = sum(sizes[: self.group.rank])
            places[dim] = slice(begin, begin + sizes[self.group.rank])
        return places[0], places[1]

    def piece(self, name: str, dim: int | None) -> Tensor:
        """This rank's piece of A, B or dC."""
        return self.tensor(name, *self.place(name, dim))

    def difference(self, name: str, found: Tensor, dim: int | None, at_most: int | None = None) -> float:
        """max|found - numpy| / max|numpy| of this rank's piece, the largest of all ranks.

        at_most: compare this many rows, evenly spread, where all would take too long.
        """
        return self.apart(name, found, *self.place(name, dim), self.group, at_most)
