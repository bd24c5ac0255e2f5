"""The cost of an operation for each way to split it, and the choice of the cheapest way that fits in memory.

Each operation lists its ways. A way is made of terms: products, transforms, copies and moves with their sizes, of the
rank that has most to do. `Rates` turns a term into seconds.

    ways = ways_of(matmul, a, b)             # list[Way]
    best = choose(grid, "matmul", ways)      # raises UsageError on every rank if none fits
    best.run()
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from common.comm.ledger import show_bytes
from common.errors import UsageError
from common.tensors.grid import Grid
from common.tensors.layout import Layout, Shard, size_of
from common.tensors.rates import Term
from common.tensors.tensor import DistributedTensor
from common.tensors.transfer import (
    adds_terms,
    bytes_sent,
    gathered_along,
    scattered_along,
    settled_sums,
    sources,
    summed_along,
)


@dataclass(frozen=True)
class Cost:
    """Cost of a way: its terms, bytes beyond the operands, and the bytes that this rank sends, exactly.

    The copies that a backend packs messages into are not counted among the bytes beyond the operands.
    """

    terms: tuple[Term, ...]
    memory: int
    sent: Fraction = Fraction(0)


@dataclass(frozen=True)
class Way:
    """A way to split an operation: its name, itself, and its cost, which is computed when it is asked for."""

    name: str
    run: Callable[[], DistributedTensor]
    costs: Callable[[], Cost]

    @cached_property
    def cost(self) -> Cost:
        """Return the cost of the rank that has most to do; bytes sent by this rank."""
        return self.costs()


def moving(source: Layout, target: Layout, dtype: torch.dtype) -> tuple[Term, ...]:
    """Return the terms of a move between layouts, of the rank that has most to do."""
    if source == target:
        return ()
    item, n = dtype.itemsize, source.grid.world.size
    terms = []
    settled = settled_sums(source, target)
    for group in summed_along(source, target):
        local = source.largest * item
        terms.append(Term("all-reduce", (2 * (group.size - 1) * local // group.size,)))
    if settled == target:
        return tuple(terms)
    sent = int(max(bytes_sent(settled, target, item, r) for r in range(n)))
    if not sent:
        copied = target.largest * item
        kept = all(
            s == t or (isinstance(t, Shard) and t.dim == 0)
            for s, t in zip(settled.placements, target.placements, strict=True)
        )
        return (*terms, *(() if kept else (Term("copy", (2 * copied,)),)))
    if gathered_along(settled, target):
        return (*terms, Term("all-gather", (sent,)))
    if scattered_along(settled, target):
        return (*terms, Term("reduce-scatter", (sent,)))
    terms.append(Term("exchange", (sent, n - 1)))
    copied = max(_copied(r, settled, target) for r in range(n)) * item - sent // (n - 1)
    return (*terms, Term("copy", (2 * copied,))) if copied > 0 else tuple(terms)


def _copied(rank: int, source: Layout, target: Layout) -> int:
    """Return the numbers that a rank copies beside the exchange: what it keeps, and every term that it adds up."""
    every = adds_terms(source, target)
    return sum(size_of(box) for owner, box in sources(rank, source, target) if every or owner == rank)


def received(source: Layout, target: Layout, dtype: torch.dtype) -> int:
    """Return the bytes that a move needs on the rank that has most: nothing where it is already there."""
    if source.boxes == target.boxes and not source.partial:
        return 0
    return target.largest * dtype.itemsize


def choose(
    grid: Grid, operation: str, ways: Sequence[Way], name: str | None = None, key: Hashable = None
) -> Way:
    """Return the cheapest way that fits, or the way called `name`.

    key: of all that the costs depend on, such as the operands' layouts; the choice among the same ways is made once for
    each. Raises UsageError, the same on every rank, if there is no such way or none fits in `grid.rates.memory`.
    """
    if grid.asked:
        raise _Asked(ways, name)
    known = (operation, key, tuple(way.name for way in ways))
    name = name or (grid.chosen.get(known) if key is not None else None)
    if name is not None:
        for way in ways:
            if way.name == name:
                return way
        raise UsageError(f"{operation}: no way {name!r}; there are {', '.join(repr(w.name) for w in ways)}")
    fits = [w for w in ways if w.cost.memory <= grid.rates.memory]
    if not fits:
        least = min(ways, key=lambda w: w.cost.memory)
        raise UsageError(
            f"{operation}: every way needs more memory on a rank than grid.rates.memory, "
            f"{show_bytes(int(grid.rates.memory))} bytes; {least.name!r} needs least, {show_bytes(least.cost.memory)}"
        )
    best = min(fits, key=lambda w: grid.rates.predict(w.cost.terms))
    grid.chosen[known] = best.name
    return best


class _Asked(Exception):
    def __init__(self, ways: Sequence[Way], name: str | None) -> None:
        super().__init__()
        self.ways, self.name = list(ways), name


def first_operand(
    operation: Callable[..., DistributedTensor], *args: Any, **kwargs: Any
) -> DistributedTensor:
    """Return the first distributed tensor of the arguments. Raises UsageError if there is none."""
    if not hasattr(operation, "__name__"):
        raise UsageError("give an operation and then its operands, as in explain(matmul, a, b)")
    for given in (*args, *kwargs.values()):
        for x in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(x, DistributedTensor):
                return x
    raise UsageError(
        f"{operation.__name__}: give at least one distributed tensor, as in explain(matmul, a, b)"
    )


def ways_of(operation: Callable[..., DistributedTensor], *args: Any, **kwargs: Any) -> list[Way]:
    """Return the ways of `operation(*args, **kwargs)`, of its first choice if it makes several.

    Does not carry the operation out; an einsum may move operands before its first choice.

    Raises UsageError as the operation does, and for one without ways.
    """
    return asked_of(operation, *args, **kwargs)[0]


def asked_of(
    operation: Callable[..., DistributedTensor], *args: Any, **kwargs: Any
) -> tuple[list[Way], str | None]:
    """Return the ways of the operation and the name of the one that the arguments ask for; see `ways_of`."""
    grid = first_operand(operation, *args, **kwargs).grid
    grid.asked = True
    try:
        operation(*args, **kwargs)
    except _Asked as found:
        return found.ways, found.name
    finally:
        grid.asked = False
    raise UsageError(f"{operation.__name__} has one way only: nothing is to be chosen")
