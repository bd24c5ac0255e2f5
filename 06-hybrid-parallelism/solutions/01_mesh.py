"""Ranks and their coordinates: a number written with a digit for each axis."""

import math


def coordinates(rank: int, shape: dict[str, int]) -> dict[str, int]:
    """Return the coordinates of a rank on the mesh."""
    at = {}
    for axis in reversed(shape):
        rank, at[axis] = divmod(rank, shape[axis])
    return at


def rank_of(at: dict[str, int], shape: dict[str, int]) -> int:
    """Return the rank at these coordinates."""
    rank = 0
    for axis in shape:
        rank = rank * shape[axis] + at[axis]
    return rank


def groups(shape: dict[str, int], axes: set[str]) -> list[list[int]]:
    """Return the groups of ranks that differ along `axes` alone."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(shape.values())):
        at = coordinates(rank, shape)
        found.setdefault(tuple(at[axis] for axis in shape if axis not in axes), []).append(rank)
    return sorted(found.values())
