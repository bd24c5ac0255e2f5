"""How a tensor lies on a grid of ranks: a placement for each axis of the grid, and the box of numbers of each rank.

    Shard(dim)     the ranks of the axis hold pieces along `dim`, in their order
    Replicate()    each of them holds all
    Partial()      each of them holds a term; the tensor is their sum

A shape [5, 4] on a grid of 2 x 2 with (Shard(0), Shard(1)):

    rank 0  [0:3, 0:2]    rank 1  [0:3, 2:4]
    rank 2  [3:5, 0:2]    rank 3  [3:5, 2:4]

Pieces differ in length by at most one, the longer ones first, or have the lengths that `Shard(dim, sizes)` gives.
A piece may be empty. If both axes cut the same dimension, the second one cuts the pieces of the first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np
import torch

from common.comm import sizes_of
from common.comm.placement import Shard as Shard
from common.errors import UsageError
from common.tensors.grid import Grid


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole."""


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis holds a term of the sum."""


Placement = Shard | Replicate | Partial
Box = tuple[tuple[int, int], ...]  # [begin, end) in each dimension


def integer(given: Any, name: str) -> int:
    """Return an integer of Python or NumPy as int. Raises UsageError for anything else."""
    try:
        return operator.index(given)
    except TypeError:
        raise UsageError(f"{name} {given!r}: give an integer") from None


def integers(given: Any, name: str) -> list[int]:
    """Return one integer, or several, as a list. Raises UsageError for anything else."""
    return [integer(n, name) for n in (given if np.iterable(given) else [given])]


def size_of(box: Box) -> int:
    """Return how many numbers a box holds."""
    return math.prod(hi - lo for lo, hi in box)


def intersect(a: Box, b: Box) -> Box:
    """Return the common part of two boxes; empty ones have size 0."""
    return tuple((max(p, r), max(max(p, r), min(q, s))) for (p, q), (r, s) in zip(a, b, strict=True))


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that take `box` out of a tensor that holds `outer`."""
    return tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(box, outer, strict=True))


@dataclass(frozen=True)
class Layout:
    """The global shape and a placement for each axis of the grid.

    Raises UsageError for a dimension that does not exist, lengths that do not add up, or a wrong number of
    placements.
    """

    grid: Grid
    shape: torch.Size
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, grid: Grid, shape: Sequence[int], placements: Placement | Sequence[Placement]) -> Layout:
        """Return the layout with negative dimensions resolved; a grid of one axis takes a placement without a tuple."""
        if not isinstance(grid, Grid):
            raise UsageError(
                f"{grid!r} is not a grid: give Grid(rt.world), after the shape and before the placements"
            )
        listed = placements if isinstance(placements, (list, tuple)) else [placements]
        given = list[Placement]()
        for p in listed:
            if not isinstance(p, (Shard, Replicate, Partial)):
                raise UsageError(f"{p!r} is not a placement: give Shard(dim), Replicate() or Partial()")
            given.append(p)
        if len(given) != len(grid.shape):
            raise UsageError(
                f"{show(given)} on {grid}: give {len(grid.shape)} placement(s), one for each axis"
            )
        if not isinstance(shape, (list, tuple)):
            raise UsageError(f"{shape!r} is not a shape: give a length for each dimension, as in (5, 4)")
        if any(n < 0 for n in shape):
            raise UsageError(f"{list(shape)} is not a shape: a length is 0 or more")
        dims, checked, cut = len(shape), list[Placement](), set[int]()
        for axis, p in enumerate(given):
            if isinstance(p, Shard):
                if not isinstance(p.dim, Integral) or not -dims <= p.dim < dims:
                    has = f"dimensions 0 to {dims - 1}" if dims else "no dimension"
                    raise UsageError(f"Shard({p.dim!r}) of a shape {list(shape)}: it has {has}")
                dim = int(p.dim) % dims
                if p.sizes is not None:
                    sizes = tuple(integers(p.sizes, f"Shard({dim}): sizes"))
                    if len(sizes) != grid.shape[axis] or min(sizes) < 0 or sum(sizes) != shape[dim]:
                        raise UsageError(
                            f"Shard({dim}, sizes={sizes}): "
                            f"give {grid.shape[axis]} lengths that add up to {shape[dim]}"
                        )
                    if dim in cut:
                        raise UsageError(
                            f"dimension {dim} is cut by several axes: only the first takes sizes"
                        )
                    even = tuple(sizes_of(shape[dim], grid.shape[axis])) == sizes
                    p = Shard(dim, None if even else sizes)
                else:
                    p = Shard(dim)
                cut.add(dim)
            checked.append(p)
        return cls(grid, torch.Size(shape), tuple(checked))

    def box(self, rank: int) -> Box:
        """Return the part of the tensor that a rank holds, or holds a term of."""
        return self.boxes[rank]

    @cached_property
    def boxes(self) -> list[Box]:
        """Return the parts of all ranks, in their order."""
        return [self._box(place) for place in self.grid.places]

    def _box(self, place: tuple[int, ...]) -> Box:
        found = [(0, length) for length in self.shape]
        for p, at, n in zip(self.placements, place, self.grid.shape, strict=True):
            if isinstance(p, Shard):
                lo, hi = found[p.dim]
                sizes = p.sizes or sizes_of(hi - lo, n)
                begin = lo + sum(sizes[:at])
                found[p.dim] = begin, begin + sizes[at]
        return tuple(found)

    @cached_property
    def mine(self) -> Box:
        """Return the box of this rank."""
        return self.box(self.grid.world.rank)

    @cached_property
    def largest(self) -> int:
        """Return how many numbers the rank holds that has most."""
        return max(map(size_of, self.boxes))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's piece."""
        return tuple(hi - lo for lo, hi in self.mine)

    def cut_along(self, dim: int) -> list[int]:
        """Return the axes of the grid that cut a dimension."""
        return [a for a, p in enumerate(self.placements) if isinstance(p, Shard) and p.dim == dim]

    @property
    def partial(self) -> bool:
        """Return True if the pieces are terms of a sum."""
        return any(isinstance(p, Partial) for p in self.placements)

    def placed(self, *placements: Placement) -> Layout:
        """Return the layout of the same shape with other placements."""
        return Layout.of(self.grid, self.shape, placements)

    def dual(self) -> Layout:
        """Return the layout of the gradient; a Partial() axis becomes Replicate()."""
        return self.placed(*(Replicate() if isinstance(p, Partial) else p for p in self.placements))

    def __repr__(self) -> str:
        return f"{list(self.shape)} as {show(self.placements)} on {self.grid}"


def together(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return placements without the lengths that do not go together: where an earlier axis cuts the dimension too."""
    cut: set[int] = set()
    found: list[Placement] = []
    for p in placements:
        if isinstance(p, Shard):
            found.append(Shard(p.dim, None if p.dim in cut else p.sizes))
            cut.add(p.dim)
        else:
            found.append(p)
    return tuple(found)


def show(placements: Sequence[object]) -> str:
    """Return placements as they are written in a program."""
    shown = [repr(p) for p in placements]
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"
