"""Ranks and their coordinates on a mesh.

A mesh arranges the ranks along five axes, outermost first: pp, dp, ep, sp, tp. `shape` gives the number of ranks along
each, for instance {"pp": 2, "dp": 1, "ep": 1, "sp": 1, "tp": 4} for 8 ranks. The innermost axis changes fastest:

    rank       0  1  2  3  4  5  6  7
    pp         0  0  0  0  1  1  1  1
    tp         0  1  2  3  0  1  2  3

Write three functions:

    coordinates(rank, shape)     the place of a rank on each axis, as a dict with the five axes
    rank_of(at, shape)           the rank at such a place: the inverse
    groups(shape, axes)          the groups in which ranks talk along `axes`: lists of the ranks that differ in the
                                 coordinates of these axes alone, each in ascending order, sorted by their first rank.
                                 Each rank is in exactly one list; without axes each rank is alone.

Targets: both directions on all 35 meshes of 8 ranks and on uneven ones; the groups of every set of axes.
"""


def coordinates(rank: int, shape: dict[str, int]) -> dict[str, int]:
    """Return the coordinates of a rank on the mesh."""
    raise NotImplementedError(
        "divide the rank by the size of the innermost axis: the remainder is its coordinate"
    )


def rank_of(at: dict[str, int], shape: dict[str, int]) -> int:
    """Return the rank at these coordinates."""
    raise NotImplementedError(
        "go from the outermost axis inwards: multiply by the axis's size, add the coordinate"
    )


def groups(shape: dict[str, int], axes: set[str]) -> list[list[int]]:
    """Return the groups of ranks that differ along `axes` alone."""
    raise NotImplementedError("collect the ranks whose coordinates on all other axes are the same")
