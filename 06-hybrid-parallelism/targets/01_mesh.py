"""Targets of ranks and coordinates: all meshes of 8 ranks and some uneven ones, beside numpy's arrays."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from common.comm import Group
from common.comm.mesh import AXES
from common.grade.targets import holds, target


def shapes() -> Iterator[dict[str, int]]:
    """Yield the 35 meshes of 8 ranks, and three whose sizes are no powers of two."""
    for sizes in itertools.product((1, 2, 4, 8), repeat=5):
        if math.prod(sizes) == 8:
            yield dict(zip(AXES, sizes, strict=True))
    for sizes in ((3, 1, 2, 1, 5), (1, 7, 1, 3, 1), (2, 3, 1, 1, 2)):
        yield dict(zip(AXES, sizes, strict=True))


def shown(shape: dict[str, int]) -> str:
    """Return the mesh as `pp=2 tp=4`."""
    return " ".join(f"{axis}={n}" for axis, n in shape.items() if n > 1)


@target("coordinates of every rank")
def places(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Compare with numpy's unravel_index."""
    for shape in shapes():
        for rank in range(math.prod(shape.values())):
            want = dict(zip(AXES, map(int, np.unravel_index(rank, tuple(shape.values()))), strict=True))
            got = mine.coordinates(rank, dict(shape))
            holds(
                isinstance(got, dict) and set(got) == set(AXES),
                f"{shown(shape)}: rank {rank} needs all five axes",
            )
            for axis in AXES:
                holds(
                    got[axis] == want[axis],
                    f"mesh {shown(shape)}, rank {rank}: its {axis} is {got[axis]}, {want[axis]} is right",
                )


@target("the rank at every place")
def ranks(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Compare with numpy's ravel_multi_index."""
    for shape in shapes():
        for place in itertools.product(*map(range, shape.values())):
            want = int(np.ravel_multi_index(place, tuple(shape.values())))
            got = mine.rank_of(dict(zip(AXES, place, strict=True)), dict(shape))
            holds(got == want, f"mesh {shown(shape)}, place {place}: rank {got}, {want} is right")


@target("the groups along every set of axes")
def talks(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Compare with lines of an array of ranks."""
    for shape in shapes():
        grid = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
        for n in range(6):
            for axes in itertools.combinations(AXES, n):
                inner = [AXES.index(axis) for axis in axes]
                size = math.prod(shape[axis] for axis in axes)
                lines = np.moveaxis(grid, inner, range(5 - len(inner), 5)).reshape(-1, size)
                want = sorted(sorted(line) for line in lines.tolist())
                got = mine.groups(dict(shape), set(axes))
                where = f"mesh {shown(shape)}, groups along {' '.join(axes) or 'no axis'}"
                holds(len(got) == len(want), f"{where}: {len(got)} groups, {len(want)} are right")
                wrong = [(list(g), w) for g, w in zip(got, want, strict=True) if list(g) != w]
                holds(not wrong, f"{where}: {wrong and wrong[0][0]}, {wrong and wrong[0][1]} is right")
