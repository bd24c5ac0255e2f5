"""The five axes, and the groups of ranks that communicate along them.

    mesh = Mesh(rt.world, dp=2, tp=2)
    mesh.group("dp"), mesh.group("dp", "ep", "sp")     # one axis; the product of several

Ranks count with tp innermost: rank = (((p*dp + d)*ep + e)*sp + s)*tp + t. Neighbours along tp communicate
most, so they should share a host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from common.comm import Group
from common.errors import UsageError

AXES = ("pp", "dp", "ep", "sp", "tp")


class Mesh:
    """A world of pp * dp * ep * sp * tp ranks; `at` is this rank's coordinate on each axis.

    timeout: seconds, for the groups that the mesh makes; default: torch's own, 30 minutes. Raises UsageError
    if the product is not the world size.
    """

    def __init__(
        self,
        world: Group,
        pp: int = 1,
        dp: int = 1,
        ep: int = 1,
        sp: int = 1,
        tp: int = 1,
        timeout: float | None = None,
    ) -> None:
        self.world, self.timeout = world, None if timeout is None else timedelta(seconds=timeout)
        self.shape = dict(zip(AXES, (pp, dp, ep, sp, tp), strict=True))
        given = " ".join(f"{axis}={n}" for axis, n in self.shape.items())
        if min(self.shape.values()) < 1:
            raise UsageError(f"mesh {given}: every axis needs at least 1 rank")
        needed = math.prod(self.shape.values())
        if needed != world.size:
            others = needed // dp
            fits = f"dp={world.size // others}" if world.size % others == 0 else f"a world of {needed} ranks"
            raise UsageError(
                f"mesh {given} needs {needed} ranks, the world has {world.size}; {fits} would fit"
            )
        self.at = self.coordinates(world.rank)
        self._groups: dict[tuple[tuple[str, ...], str], Group] = {(AXES, ""): world}
        self._parts: dict[tuple[str, str, str], Group | None] = {}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a global rank on each axis."""
        place = np.unravel_index(rank, tuple(self.shape.values()))
        return dict(zip(AXES, map(int, place), strict=True))

    def group(self, *axes: str, purpose: str = "") -> Group:
        """Return the group of ranks that differ from this one along `axes` alone, in rank order.

        The first call for some axes makes a process group on every rank: all ranks must make these calls in
        the same order. Axes of size 1 cost nothing. purpose: tells apart groups of the same ranks, whose messages
        must not wait for one another's. Raises UsageError for an unknown axis.
        """
        if unknown := set(axes) - set(AXES):
            raise UsageError(f"axis {unknown.pop()!r} is unknown; the axes are {', '.join(AXES)}")
        wanted = tuple(a for a in AXES if a in axes and self.shape[a] > 1)
        name = "world" if set(axes) == set(AXES) else "+".join(a for a in AXES if a in axes)
        if all(self.shape[a] == 1 or a in wanted for a in AXES):
            wanted = AXES
        if (wanted, purpose) not in self._groups:
            made = self._make(wanted)
            assert made is not None
            self._groups[wanted, purpose] = made
        g = self._groups[wanted, purpose]
        return Group(name, g.rank, g.size, g.ranks, g.pg)

    def rank_along(self, axes: str) -> int:
        """Return this rank's place in the group along `axes`, joined as in `Group.axis`: "dp", "dp+ep"."""
        along = [axis for axis in AXES if axis in axes.split("+")]
        return int(np.ravel_multi_index([self.at[a] for a in along], [self.shape[a] for a in along]))

    def part(self, axis: str, places: Sequence[int], purpose: str = "") -> Group | None:
        """Return the group of the ranks at `places` along an axis; None on others.

        All ranks must call it, in the same order. purpose: as in `group`.
        """
        chosen = tuple(sorted(set(places)))
        key = (axis, str(chosen), purpose)
        if key not in self._parts:
            self._parts[key] = self._make((axis,), chosen)
        return self._parts[key]

    def close(self) -> None:
        """Destroy the groups that this mesh made; with many meshes a program would run out of connections."""
        for group in (*self._groups.values(), *self._parts.values()):
            if group is not None and group.pg is not None and group.pg is not self.world.pg:
                dist.destroy_process_group(group.pg)
        self._groups, self._parts = {(AXES, ""): self.world}, {}

    def _make(self, axes: tuple[str, ...], places: tuple[int, ...] | None = None) -> Group | None:
        """Make all groups along `axes`, and return this rank's; places: only these ranks of a single axis."""
        if not axes:
            return Group("", 0, 1, (self.world.rank,))
        grid = np.arange(self.world.size).reshape(tuple(self.shape.values()))
        if places is not None:
            grid = grid.take(places, AXES.index(axes[0]))
        inner = [AXES.index(axis) for axis in axes]
        lines = np.moveaxis(grid, inner, range(-len(inner), 0))
        mine: Group | None = None
        for ranks in lines.reshape(-1, math.prod(lines.shape[-len(inner) :])).tolist():
            # every rank makes every group
            pg = (
                dist.new_group([self.world.ranks[r] for r in ranks], self.timeout) if len(ranks) > 1 else None
            )
            if self.world.rank in ranks:
                mine = Group("+".join(axes), ranks.index(self.world.rank), len(ranks), tuple(ranks), pg)
        return mine
