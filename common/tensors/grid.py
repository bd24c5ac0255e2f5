"""The mesh of ranks that tensors lie on, and the check that all of its ranks do the same.

    grid = Grid(rt.world)            # one axis
    grid = Grid(rt.world, 2, 3)      # two axes; rank = 3 * row + column
    grid = Grid(rt.world, 2, 2, 2)   # three, for products that keep several copies of their operands

Every operation is called by all ranks. Each rank keeps a digest of the operations that it has called so far; before
ranks communicate they compare digests, so that ranks which call different operations get one error on every rank
instead of a hang.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch

from common import comm
from common.comm import Group, ledger, travel
from common.comm.frames import line_of_user
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.tensors.rates import Rates

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Grid:
    """The ranks of `world` in one, two or three axes of the given lengths.

    check: compare what the ranks do before they communicate. Raises UsageError if the product of the lengths is not
    the number of ranks. All ranks must call it.
    """

    def __init__(self, world: Group, *shape: int, check: bool = True) -> None:
        if not isinstance(world, Group):
            raise UsageError(f"a grid of a {type(world).__name__}: give its ranks, as in Grid(rt.world)")
        if not all(isinstance(n, int) for n in shape):
            raise UsageError(f"a grid of {shape}: give whole lengths one by one, as in Grid(rt.world, 2, 2)")
        self.world, self.check = world, check
        self.shape = shape or (world.size,)
        if len(self.shape) > 3 or min(self.shape) < 1 or math.prod(self.shape) != world.size:
            fits = [(n, world.size // n) for n in range(1, world.size + 1) if world.size % n == 0]
            raise UsageError(
                f"a grid of {' x '.join(map(str, shape))} on {world.size} rank(s): give one to three lengths whose "
                f"product is {world.size}, such as {', '.join(f'{a} x {b}' for a, b in fits)}"
            )
        self.groups: tuple[Group, ...] = (replace(world, axis="0"),)
        if len(self.shape) > 1:
            names = ("dp", "sp", "tp")[: len(self.shape)]
            mesh = Mesh(world, **dict(zip(names, self.shape, strict=True)))
            self.groups = tuple(replace(mesh.group(name), axis=str(a)) for a, name in enumerate(names))
        self.places = [tuple(map(int, np.unravel_index(r, self.shape))) for r in range(world.size)]
        self.place = self.places[world.rank]
        self._rates = Rates()
        self.chosen: dict[tuple[Hashable, ...], str] = {}  # ways that were chosen before, by these rates
        self.caches: dict[Callable[..., Any], Callable[..., Any]] = {}  # of functions of layouts on this grid
        self.asked = False  # the ways of the next operation are asked for, which is not carried out
        self._done = hashlib.sha256()
        self._last = "nothing"
        self._depth = 0

    def __repr__(self) -> str:
        return f"Grid({' x '.join(map(str, self.shape))})"

    @property
    def rates(self) -> Rates:
        """Speeds and memory of a rank, by which operations choose how to split; equal on all ranks."""
        return self._rates

    @rates.setter
    def rates(self, rates: Rates) -> None:
        with self.operation(
            f"rates = {rates}"
        ):  # so that ranks with different rates find out before they hang
            self._rates, self.chosen = rates, {}

    @contextmanager
    def operation(self, description: str) -> Iterator[None]:
        """Note that this rank enters an operation; operations inside it belong to it and are not noted."""
        if self._depth == 0 and self.check and not self.asked:
            self._done.update(description.encode())
            self._last = description
        if self._depth == 0:
            travel.doing = f" of {description}"
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                travel.doing = ""

    def meet(self, problem: str = "") -> None:
        """Compare what the ranks have called, before they communicate.

        problem: why this rank cannot take part. Raises UsageError on every rank if a rank has a problem or calls
        something else.
        """
        if self.world.size == 1 or not self.check:
            if problem:
                raise UsageError(problem)
            return
        mine = int.from_bytes(self._done.digest()[:7], "little")
        with ledger.uncounted():
            found = torch.tensor([mine, -mine, 1 if problem else 0])
            comm.all_reduce(found, self.world, "max")
            if int(found[0]) == mine == -int(found[1]) and not found[2]:
                return
            said = comm.everyones((self._last, line_of_user(), problem), self.world)
        problems: dict[str, list[int]] = {}
        for r, (_, _, text) in enumerate(said):
            problems.setdefault(text, []).append(r)
        problems.pop("", None)
        if problems:
            by = [f"rank(s) {', '.join(map(str, of))}: {text}" for text, of in problems.items()]
            raise UsageError("; ".join(by))
        ranks: dict[tuple[str, str], list[int]] = {}
        for r, (last, line, _) in enumerate(said):
            ranks.setdefault((last, line), []).append(r)
        by = [f"{line}: {last} on rank(s) {', '.join(map(str, of))}" for (last, line), of in ranks.items()]
        if len({last for last, _, _ in said}) == 1:
            by.append(
                "what they called before differs, in an operation, a shape, a number or a seed; "
                "make a new Grid to go on"
            )
        raise UsageError(
            f"all ranks must call the same operations in the same order, but called {'; '.join(by)}"
        )


def cached_on_grid(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Cache results on the grid of the first argument, so that grid and ranks are freed with their last tensor."""

    @wraps(function)
    def cached(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        caches = cast(Any, args[0]).grid.caches
        if function not in caches:
            caches[function] = lru_cache(4096)(function)
        return cast(Found, caches[function](*args, **kwargs))

    return cached


def same_grid(grids: Sequence[Grid], operation: str) -> Grid:
    """Return the grid that all operands lie on. Raises UsageError if they differ."""
    first, *others = grids
    if any(other is not first for other in others):
        shown = ", ".join(map(repr, grids))
        raise UsageError(
            f"{operation}: the operands lie on different Grid objects, {shown}; make one, and all tensors on it"
        )
    return first
