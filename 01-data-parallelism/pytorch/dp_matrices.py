"""Splits of dp_matrix_multiply.py: the dimension along which each matrix is sharded, and the options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from common.comm import Group, sizes_of
from common.comm.ledger import Ledger
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.matrices import Place, Product, ProductOptions, cut

Gather = Callable[[Tensor, int, list[int], Group], Tensor | None]


@dataclass(frozen=True)
class Split:
    """Dimension along which each matrix is sharded; None: replicated on every rank."""

    a: int | None
    b: int | None
    c: int

    def layout(self) -> tuple[str, ...]:
        """Return R or S(dimension) of A, B and C."""
        return tuple("R" if dim is None else f"S({dim})" for dim in (self.a, self.b, self.c))

    def places(self, shape: tuple[int, int, int], group: Group) -> dict[str, Place]:
        """Return (rows, columns) of this rank's shards of A [M, K], B [K, J] and C [M, J]."""
        M, K, J = (slice(0, length) for length in shape)

        def place(dim: int | None, *whole: slice) -> Place:
            rows, columns = (cut(x, group.size, group.rank) if i == dim else x for i, x in enumerate(whole))
            return rows, columns

        return {"A": place(self.a, M, K), "B": place(self.b, K, J), "C": place(self.c, M, J)}


SPLITS = {
    "rows": Split(0, None, 0),
    "columns": Split(None, 1, 1),
    "inner": Split(1, 0, 0),
    "gathered": Split(0, 0, 0),
}


@dataclass
class MatrixOptions(ProductOptions):
    """Options of dp_matrix_multiply.py: sizes and splits."""

    splits: tuple[str, ...] = tuple(SPLITS)
    """Splits to run."""
    panels: Size = 1
    """Number of row panels in which `inner` is computed; one is sent while the next is computed."""
    gather: bool = False
    """Gather each result on rank 0, too."""


def gathered_difference(gather: Gather, o: MatrixOptions, rt: Runtime, dim: int, c: Tensor) -> float:
    """Return the difference of the result on rank 0 from numpy's.

    It is infinite if the bytes differ from the formula, or if other ranks have the result, too.
    """
    M, _, J = o.shape
    with Ledger() as ledger:
        whole = gather(c, dim, sizes_of((M, J)[dim], rt.world_size), rt.world)
    if ledger.bytes() != (rt.rank > 0) * c.nbytes or (whole is None) != (rt.rank > 0):
        return math.inf
    if whole is None:
        return 0.0
    return Product(o, rt.device).apart("C", whole, (slice(0, M), slice(0, J)), Group.alone())
