"""The cost of an operation for each way to split it, and the choice of the cheapest way that fits in memory.

Each operation lists its ways. A way is made of terms: products, transforms, copies and moves with their sizes, of the
rank that has most to do. `Rates` turns a term into seconds.

    ways = matmul_ways(a, b)                 # list[Way]
    best = choose(grid, "matmul", ways)      # raises UsageError on every rank if none fits
    best.run()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.comm.ledger import show_bytes
from common.errors import UsageError
from common.tensors.grid import Grid
from common.tensors.rates import Term
from common.tensors.tensor import DistributedTensor


@dataclass(frozen=True)
class Way:
    """A way to split an operation: its name, its terms, the bytes that it needs beyond its operands, and itself."""

    name: str
    terms: tuple[Term, ...]
    memory: int
    run: Callable[[], DistributedTensor] = field(compare=False)


def choose(grid: Grid, operation: str, ways: Sequence[Way], name: str | None = None) -> Way:
    """Return the cheapest way that fits, or the way called `name`.

    Raises UsageError, the same on every rank, if there is no such way or none fits in `grid.rates.memory`.
    """
    if name is not None:
        for way in ways:
            if way.name == name:
                return way
        raise UsageError(f"{operation}: no way {name!r}; there are {', '.join(w.name for w in ways)}")
    fits = [w for w in ways if w.memory <= grid.rates.memory]
    if not fits:
        least = min(ways, key=lambda w: w.memory)
        raise UsageError(
            f"{operation}: the least that a way needs is {show_bytes(least.memory)} on a rank ({least.name}), "
            f"allowed are {show_bytes(int(grid.rates.memory))}"
        )
    return min(fits, key=lambda w: grid.rates.predict(w.terms))
