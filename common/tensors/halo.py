"""Boxes of a tensor that overlap: what each rank needs of it for its part of a result, brought in one exchange.

    rows 0 1 2 3 | 4 5 6 7          the rank that makes rows 0 to 3 of a 3-wide convolution needs rows 0 to 4,
    rank 0  [0:5]    rank 1  [3:8]  the other rows 3 to 7

Each rank sends to each other the part of its piece that lies in the other's box, once, whatever the boxes are: a halo
wider than a neighbour's piece comes from several ranks. The adjoint sends the gradients of a box back to the owners of
its parts, and adds them up where boxes overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from torch import Tensor

from common import comm
from common.comm import Pending
from common.tensors.layout import Box, Layout, Replicate, inside, intersect, size_of


@dataclass(frozen=True)
class Halo:
    """The box of each rank, and the layout of the tensor that the boxes are cut from."""

    source: Layout
    boxes: tuple[Box, ...]

    @cached_property
    def owners(self) -> list[list[tuple[int, Box]]]:
        """Return for each rank those that give it its box, each with its part.

        Of a replicated tensor the rank at the same place of that axis gives it.
        """
        return [self._owners(rank) for rank in range(self.source.grid.world.size)]

    def _owners(self, rank: int) -> list[tuple[int, Box]]:
        grid = self.source.grid
        at = grid.places[rank]
        found = []
        for other, place in enumerate(grid.places):
            copies = zip(self.source.placements, place, at, strict=True)
            if all(theirs == ours for p, theirs, ours in copies if isinstance(p, Replicate)):
                part = intersect(self.source.box(other), self.boxes[rank])
                if size_of(part):
                    found.append((other, part))
        return found

    def sends(self, rank: int) -> list[tuple[int, Box]]:
        """Return the ranks that get a part of this rank's piece, each with its part."""
        every = range(self.source.grid.world.size)
        return [(other, part) for other in every for owner, part in self.owners[other] if owner == rank]

    def bytes_sent(self, item: int, rank: int | None = None) -> Fraction:
        """Return the bytes that a rank sends, this one by default. item: bytes per number."""
        rank = self.source.grid.world.rank if rank is None else rank
        return Fraction(item * sum(size_of(part) for other, part in self.sends(rank) if other != rank))

    @cached_property
    def moves(self) -> bool:
        """Return True if any rank sends."""
        return any(other != r for r in range(self.source.grid.world.size) for other, _ in self.owners[r])


class Exchange:
    """The exchange of a halo, begun when this is made; `box` returns what has come."""

    def __init__(self, x: Tensor, halo: Halo) -> None:
        self.x, self.halo, self.me = x, halo, halo.source.grid.world.rank
        self.came = [(r, part) for r, part in halo.owners[self.me] if r != self.me]
        self.received: list[Tensor] = []
        self.pending: Pending | None = None
        if not halo.moves:
            return
        halo.source.grid.meet()
        to = [(r, part) for r, part in halo.sends(self.me) if r != self.me]
        self.received, self.pending = _started(x, halo.source.mine, halo, to, self.came)

    def wait(self) -> None:
        """Wait until this rank's parts have gone and the others' have come."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def box(self, box: Box) -> Tensor:
        """Wait, and return a part of this rank's box, or all of it."""
        self.wait()
        came = [(part, piece) for (_, part), piece in zip(self.came, self.received, strict=True)]
        parts = [(self.halo.source.mine, self.x), *came]
        for part, piece in parts:
            if part == box:
                return piece
        out = self.x.new_empty([hi - lo for lo, hi in box])
        for part, piece in parts:
            common = intersect(part, box)
            if size_of(common):
                out[inside(common, box)] = piece[inside(common, part)]
        return out


def sent_back(dy: Tensor, halo: Halo) -> Tensor:
    """Return the gradient of this rank's piece: those of all boxes, added where they overlap. Adjoint of Exchange."""
    me, here = halo.source.grid.world.rank, halo.source.mine
    box = halo.boxes[me]
    out = dy.new_zeros([hi - lo for lo, hi in here])
    mine = intersect(here, box)
    if size_of(mine) and any(r == me for r, _ in halo.owners[me]):
        out[inside(mine, here)] = dy[inside(mine, box)]
    if not halo.moves:
        return out
    halo.source.grid.meet()
    to = [(r, part) for r, part in halo.owners[me] if r != me]
    came = [(r, part) for r, part in halo.sends(me) if r != me]
    received, pending = _started(dy, box, halo, to, came)
    pending.wait()
    for (_, part), piece in zip(came, received, strict=True):
        out[inside(part, here)] += piece
    return out


def _started(
    x: Tensor, box: Box, halo: Halo, to: Sequence[tuple[int, Box]], came: Sequence[tuple[int, Box]]
) -> tuple[list[Tensor], Pending]:
    """Start sending parts of x, the content of `box`. Return the tensors that are received, and the exchange."""
    world = replace(halo.source.grid.world, axis="grid")
    pieces = [x.new_empty(0)] * world.size
    places = list(pieces)
    for rank, part in to:
        pieces[rank] = x[inside(part, box)]
    for rank, part in came:
        places[rank] = x.new_empty([hi - lo for lo, hi in part])
    pending = comm.all_to_all_views(places, pieces, world, async_op=True)
    return [places[rank] for rank, _ in came], pending
