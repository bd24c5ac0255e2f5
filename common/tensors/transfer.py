"""Moving a tensor from one layout to another: one all-to-all for any pair of layouts.

    source (Shard(0))        target (Shard(1))        rank 0 sends its part of rank 1's box, and the reverse
    rank 0  a a | b b        rank 0  a a   rank 1  b b
    rank 1  c c | d d                c c           d d

Each rank fills the box that it holds in the target from the ranks that hold its parts in the source: from its own
copy along a replicated axis, from every rank along an axis of terms, which are added in the order of the ranks. No
number is sent twice to the same rank, and none is padded. Sums that every rank needs are all-reduces. Equal pieces that
follow one another in memory are all-gathered, or summed by a reduce-scatter: the same bytes with fewer copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from common import comm
from common.comm import Group
from common.tensors.grid import cached_on_grid
from common.tensors.layout import (
    Box,
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    inside,
    intersect,
    size_of,
)
from common.utils.pages import new_empty, new_result

HALF = (torch.float16, torch.bfloat16)


def sources(rank: int, source: Layout, target: Layout) -> list[tuple[int, Box]]:
    """Return the ranks from which `rank` fills its target box, in order, each with the box that it gives."""
    grid, at = source.grid, source.grid.places[rank]
    lines: list[Sequence[int]] = []
    for here, n, before, after in zip(at, grid.shape, source.placements, target.placements, strict=True):
        if isinstance(after, Partial):  # a term each; of a replicated tensor the first rank has it all
            lines.append([here] if here == 0 or not isinstance(before, Replicate) else [])
        else:
            lines.append([here] if isinstance(before, Replicate) else range(n))
    wanted, found = target.box(rank), []
    for place in itertools.product(*lines):
        other = grid.places.index(place)
        box = intersect(source.box(other), wanted)
        if size_of(box):
            found.append((other, box))
    return found


@cached_on_grid
def _plan(source: Layout, target: Layout) -> tuple[list[Box | None], list[Box | None], bool]:
    """Return (box for each rank, box from each rank, True if any rank sends); None where nothing travels."""
    grid, me = source.grid, source.grid.world.rank
    to: list[Box | None] = [None] * grid.world.size
    came: list[Box | None] = [None] * grid.world.size
    any_moves = False
    for rank in range(grid.world.size):
        for other, box in sources(rank, source, target):
            any_moves |= other != rank
            if other == me:
                to[rank] = box
            if rank == me:
                came[other] = box
    return to, came, any_moves


def settled_sums(source: Layout, target: Layout) -> Layout:
    """Return the layout after the all-reduce: terms that every rank needs summed are replicated."""
    return source.placed(
        *(
            Replicate() if isinstance(p, Partial) and isinstance(q, Replicate) else p
            for p, q in zip(source.placements, target.placements, strict=True)
        )
    )


def adds_terms(source: Layout, target: Layout) -> bool:
    """Return True if a rank adds what it receives from the ranks of an axis of terms."""
    axes = zip(source.placements, target.placements, strict=True)
    return any(isinstance(p, Partial) and not isinstance(q, Partial) for p, q in axes)


def summed_along(source: Layout, target: Layout) -> list[Group]:
    """Return the groups in which terms are summed by all-reduce: the whole grid at once where all axes are."""
    summed = settled_sums(source, target).placements
    axes = [a for a, (p, q) in enumerate(zip(source.placements, summed, strict=True)) if p != q]
    if len(axes) == len(source.placements):
        return [replace(source.grid.world, axis="grid")]
    return [source.grid.groups[a] for a in axes]


def moved(piece: Tensor, source: Layout, target: Layout) -> Tensor:
    """Return this rank's piece in the target layout, of its piece in the source layout. Not differentiable.

    Raises UsageError on every rank if the ranks do not call the same operations.
    """
    if source == target:
        return piece
    piece = piece.resolve_conj().resolve_neg()  # marks of a view, which messages do not carry
    if groups := [g for g in summed_along(source, target) if g.size > 1]:
        source.grid.meet()
        piece = piece.clone(memory_format=torch.contiguous_format)
        for group in groups:
            if piece.numel():
                comm.all_reduce(torch.view_as_real(piece) if piece.is_complex() else piece, group)
    source = settled_sums(source, target)
    to, came, any_moves = _plan(source, target)
    me = source.grid.world.rank
    if not any_moves:
        box = came[me]
        if box is not None and box == target.mine:
            return piece[inside(box, source.mine)].contiguous()
        out = piece.new_zeros(target.local_shape)
        if box is not None:
            out[inside(box, target.mine)] = piece[inside(box, source.mine)]
        return out
    source.grid.meet()
    gather, scatter = gathered_along(source, target), scattered_along(source, target)
    if gather is None and (scatter is None or piece.dtype in HALF):
        return _exchanged(piece, source, target, to, came)
    out, piece = new_empty(target.local_shape, piece.dtype, piece.device), piece.contiguous()
    if gather is not None:
        comm.all_gather_into(_flat(out), _flat(piece), gather)
    elif scatter is not None:
        comm.reduce_scatter_into(_flat(out), _flat(piece), scatter)
    return out


def gathered_along(source: Layout, target: Layout) -> Group | None:
    """Return the group whose all-gather moves the tensor; None if no all-gather does.

    It sends the bytes of the all-to-all, for which each rank may have to make a copy for every other.
    """
    return _equal_pieces(target, source, Replicate)


def scattered_along(source: Layout, target: Layout) -> Group | None:
    """Return the group whose reduce-scatter moves the tensor; None if no reduce-scatter does.

    It sends the bytes of the all-to-all, and needs no memory for the terms of others.
    """
    return _equal_pieces(source, target, Partial)


def _equal_pieces(one: Layout, cut: Layout, kind: type[Placement]) -> Group | None:
    """Return the group of the axis that is `kind` in one layout and in the other cuts equal pieces.

    The pieces follow one another in memory. None where the layouts differ in another way.
    """
    changed = [a for a, (p, q) in enumerate(zip(one.placements, cut.placements, strict=True)) if p != q]
    if len(changed) != 1:
        return None
    [axis] = changed
    p, group = cut.placements[axis], cut.grid.groups[axis]
    if not isinstance(one.placements[axis], kind) or not isinstance(p, Shard) or p.sizes:
        return None
    uneven = cut.shape[p.dim] % group.size or len(cut.cut_along(p.dim)) > 1
    return None if uneven or math.prod(cut.shape[: p.dim]) != 1 else group


def _flat(x: Tensor) -> Tensor:
    """Return the numbers of a tensor as one line of a type that every backend carries."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return (x.view(torch.uint8) if x.dtype == torch.bool else x).flatten()


def _exchanged(
    piece: Tensor, source: Layout, target: Layout, to: list[Box | None], came: list[Box | None]
) -> Tensor:
    """Return the piece that an all-to-all brings."""
    world = replace(source.grid.world, axis="grid")
    arrived = sum(size_of(b) for b in came if b)
    adds = adds_terms(source, target)
    wide = torch.float32 if adds and piece.dtype in HALF else piece.dtype
    out = new_result(target.local_shape, wide, piece.device, world)
    if adds or arrived < size_of(target.mine):
        out.zero_()
    nothing = piece.new_empty(0)
    pieces = [piece[inside(b, source.mine)] if b else nothing for b in to]
    places = [out[inside(b, target.mine)] if b else nothing for b in came]
    if not adds:
        comm.all_to_all_views(places, pieces, world)
        return out
    own, pieces[world.rank] = pieces[world.rank], nothing
    terms = [
        nothing if r == world.rank else new_result(place.shape, piece.dtype, piece.device, world)
        for r, place in enumerate(places)
    ]
    comm.all_to_all_views(terms, pieces, world)
    terms[world.rank] = own
    for place, term in zip(places, terms, strict=True):  # in the order of the ranks
        place.add_(term)
    return out.to(piece.dtype)


@cached_on_grid
def bytes_sent(source: Layout, target: Layout, item: int, rank: int | None = None) -> Fraction:
    """Return the bytes that a rank sends in `moved`, this one by default. item: bytes per number."""
    rank = source.grid.world.rank if rank is None else rank
    local = size_of(source.box(rank)) * item
    summed = sum(
        (Fraction(2 * (g.size - 1) * local, g.size) for g in summed_along(source, target)), Fraction(0)
    )
    source = settled_sums(source, target)
    boxes = (
        box
        for other in range(source.grid.world.size)
        if other != rank
        for owner, box in sources(other, source, target)
        if owner == rank
    )
    return summed + item * sum(map(size_of, boxes))
