"""Counted communication without autograd: what every differentiable collective and every optimizer is built on.

Each function takes the group it talks in, adds a row to the ledger, and returns at once when the group
has one rank. Sources and destinations are ranks *inside* the group.

Sizes: n ranks in the group, |x| bytes of the whole tensor. "Sends" is per rank, the mean over the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.comm.group import Group
from common.comm.hooks import checked_call
from common.comm.travel import (
    Pending,
    add_along_tree,
    add_up,
    adds_itself,
    carried,
    in_place,
    joined,
    room_for,
    share,
)

T = TypeVar("T")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}


def _options(op: dist.ReduceOp.RedOpType, async_op: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, async_op  # type: ignore[assignment]
    return options


OPTIONS = {(name, flag): _options(op, flag) for name, op in OPS.items() for flag in (False, True)}


@checked_call
def all_reduce(x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Pending:
    """In place: P(x) to R(x). Sends 2(n-1)/n |x| (ring: reduce-scatter, then all-gather)."""
    y, back = in_place(x, group)
    numbers = torch.view_as_real(y) if y.is_complex() else y
    ready = Pending("all_reduce", group, share(x, 2, group), back)

    def post() -> dist.Work | None:
        # dist.all_reduce checks more, which takes longer than the sum of a small tensor
        assert group.pg is not None
        return group.pg.allreduce([numbers], OPTIONS[op, async_op])

    return ready.start(post, async_op)


@checked_call
def broadcast(x: Tensor, group: Group, src: int = 0, async_op: bool = False) -> Pending:
    """In place: x of rank `src` to R(x). Sends (n-1)/n |x|."""
    y, back = in_place(x, group)
    ready = Pending("broadcast", group, share(x, 1, group), back)
    return ready.start(
        lambda: dist.broadcast(y, group.ranks[src], group=group.pg, async_op=async_op), async_op
    )


@checked_call
def reduce(x: Tensor, group: Group, dst: int = 0) -> None:
    """In place: P(x) to the sum on rank `dst`; the contents of x on other ranks are undefined. Sends (n-1)/n |x|."""
    y, back = in_place(x, group)
    ready = Pending("reduce", group, share(x, 1, group), back)
    ready.start(
        lambda: (
            add_along_tree(y, group, dst)
            if adds_itself(group)
            else dist.reduce(y, group.ranks[dst], group=group.pg)
        )
    )


def sizes_of(total: int, parts: int) -> list[int]:
    """Return the sizes of `parts` pieces of `total`: they differ by at most one, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def padded(total: int, parts: int) -> int:
    """Return the total length of `parts` pieces of `total`, padded to the longest, as they are gathered."""
    return parts * max(sizes_of(total, parts))


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Return x with dimension `dim` first, padded with zeros to `size`: collectives need equal pieces."""
    x = x.movedim(dim, 0)
    if x.shape[0] < size:
        x = torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])
    return x.contiguous()


def all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """S(x on dim) to R: the pieces of all ranks joined along `dim`. Sends (n-1)/n |x|, |x| of the result.

    sizes: each rank's length along `dim` where they differ; the shorter ones travel padded.
    """
    if group.size == 1:
        return x
    sizes = sizes or [x.shape[dim]] * group.size
    piece = _pad(x, dim, max(sizes))
    out = piece.new_empty(group.size * max(sizes), *piece.shape[1:])
    all_gather_into(out, piece, group)
    pieces = [p[:size] for p, size in zip(out.chunk(group.size), sizes, strict=True)]
    return torch.cat(pieces).movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """P(x) to S(x on dim): this rank's piece of the sum. Sends (n-1)/n |x|.

    sizes: each rank's length along `dim`, as `sizes_of` cuts when absent; the shorter ones travel padded.
    """
    if group.size == 1:
        return x
    sizes = list(sizes or sizes_of(x.shape[dim], group.size))
    longest = max(sizes)
    pieces = torch.cat([_pad(p, dim, longest) for p in torch.split(x, sizes, dim)])
    out = pieces.new_empty(longest, *pieces.shape[1:])
    reduce_scatter_into(out, pieces, group)
    return out[: sizes[group.rank]].movedim(0, dim).contiguous()


@checked_call
def all_gather_into(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Pending:
    """S(x on dimension 0) to R(out), pieces of equal length; x may be this rank's place in out. Sends (n-1)/n |x|.

    Both are contiguous: nothing is copied on the way. Raises ValueError where x does not fill out n times.
    """
    _check_pieces("all_gather_into", out, x, group)
    if group.size == 1:
        out.copy_(x.view_as(out))
    y, (room, back) = carried(x, group), room_for(out, group)
    ready = Pending("all_gather", group, share(out, 1, group), back)
    flat, piece = room.view(-1), y.view(-1)
    return ready.start(
        lambda: dist.all_gather_single(flat, piece, group=group.pg, async_op=async_op), async_op
    )


@checked_call
def reduce_scatter_into(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Pending:
    """P(x) to S(out on dimension 0), pieces of equal length; out may be this rank's place in x. Sends (n-1)/n |x|.

    Both are contiguous: nothing is copied on the way. Raises ValueError where out does not fill x n times.
    On gloo an all-to-all carries the terms, and wait() adds them in the order of the ranks.
    """
    _check_pieces("reduce_scatter_into", x, out, group)
    if group.size == 1:
        out.copy_(x.view_as(out))
    y = carried(x, group).view(-1)
    call: Callable[..., dist.Work | None] = dist.reduce_scatter_single
    room, finish = room_for(out, group)
    if adds_itself(group):
        call, room = dist.all_to_all_single, torch.empty_like(y)
        finish = partial(add_up, out, room, group.size)
    ready = Pending("reduce_scatter", group, share(x, 1, group), finish)
    return ready.start(lambda: call(room.view(-1), y, group=group.pg, async_op=async_op), async_op)


def _check_pieces(call: str, whole: Tensor, piece: Tensor, group: Group) -> None:
    if whole.numel() != group.size * piece.numel() or whole.dtype != piece.dtype:
        raise ValueError(
            f"{call}: {group.size} pieces of {piece.numel()} {piece.dtype} do not fill {whole.numel()} {whole.dtype}"
        )
    if not (whole.is_contiguous() and piece.is_contiguous()):
        raise ValueError(f"{call}: tensors with gaps in memory; give contiguous ones")


def all_to_all(
    x: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Piece j of dimension 0 goes to rank j. Sends what is meant for others, counted exactly.

    send_sizes, receive_sizes: lengths along dimension 0 to and from each rank; equal pieces when absent.
    Raises ValueError where dimension 0 does not divide by n and no sizes are given.
    """
    if group.size == 1:
        return x
    if send_sizes is None and x.shape[0] % group.size:
        raise ValueError(
            f"all_to_all: length {x.shape[0]} does not divide into {group.size} equal pieces: give sizes"
        )
    send = list(send_sizes or [x.shape[0] // group.size] * group.size)
    receive = list(receive_sizes or [x.shape[0] // group.size] * group.size)
    out = x.new_empty(sum(receive), *x.shape[1:])
    all_to_all_into(out, x.contiguous(), group, send, receive)
    return out


@checked_call
def all_to_all_into(
    out: Tensor,
    x: Tensor,
    group: Group,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    async_op: bool = False,
) -> Pending:
    """`all_to_all` with a place for the result; both are contiguous. Leave x as it is until the result is there."""
    if group.size == 1:
        out.copy_(x)
    return _all_to_all(out, x, group, send_sizes, receive_sizes, async_op)


def _all_to_all(
    out: Tensor,
    x: Tensor,
    group: Group,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    async_op: bool,
    then: Callable[[], object] = lambda: None,
) -> Pending:
    """Start an all-to-all; `then` is called when the result is there."""
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    send, receive = list(send_sizes), list(receive_sizes)
    y, (room, back) = carried(x, group), room_for(out, group)
    ready = Pending(
        "all_to_all",
        group,
        (sum(send) - send[group.rank]) * row_bytes,
        lambda: (back(), then()),
    )
    return ready.start(
        lambda: dist.all_to_all_single(room, y, receive, send, group=group.pg, async_op=async_op), async_op
    )


@checked_call
@torch.no_grad()
def all_to_all_views(
    places: Sequence[Tensor], pieces: Sequence[Tensor], group: Group, async_op: bool = False
) -> Pending:
    """Send pieces[r] to rank r, and fill places[r] with the piece that rank r has for this one.

    A piece has the shape of its place; both may be views with gaps. Sends all pieces but this rank's own, counted
    exactly. Leave the pieces as they are, and the places unread, until `wait()` returns.

    On MPI the ranks of a host copy from piece to place through the memory that they share. Other backends get the
    pieces one behind another. Raises ValueError where numbers or types of pieces and places differ, and
    for a place that is a conjugate view.
    """
    me, pg = group.rank, group.pg
    if len(places) != group.size or len(pieces) != group.size:
        raise ValueError(f"{len(pieces)} pieces and {len(places)} places for {group.size} ranks")
    if places[me].shape != pieces[me].shape or len({x.dtype for x in (*places, *pieces)}) > 1:
        raise ValueError(f"a place {_described(places[me])} for a piece {_described(pieces[me])}")
    if any(x.is_conj() or x.is_neg() for x in places):
        raise ValueError("a place cannot be a conjugate or a negative view")
    room, sent = ([_as_real(x) for x in views] for views in (places, pieces))
    if pg is not None and dist.get_backend(pg) == "fived" and not sent[me].is_cuda:
        ready = Pending("all_to_all", group, sum(x.nbytes for x in sent) - sent[me].nbytes)
        options = dist.AllToAllOptions()
        options.asyncOp = async_op
        return ready.start(lambda: pg.alltoall(room, sent, options), async_op)
    others = [[*x[:me], x[me].new_empty(0), *x[me + 1 :]] for x in (room, sent)]
    if _joins(room, sent) <= _joins(*others):
        places[me].copy_(pieces[me])
        room, sent = others
    return _packed_all_to_all(room, sent, group, async_op)


def _joins(*lists: Sequence[Tensor]) -> int:
    """Return how many of the lists need no copy to become one tensor."""
    return sum(joined(views) is not None for views in lists)


def _packed_all_to_all(
    places: Sequence[Tensor], pieces: Sequence[Tensor], group: Group, async_op: bool
) -> Pending:
    """Start an all-to-all of pieces that are joined to one tensor; `wait()` fills the places."""
    x, out = joined(pieces), joined(places)
    send, receive = ([view.numel() for view in views] for views in (pieces, places))
    if x is None:
        x = pieces[0].new_empty(sum(send))
        for piece, part in zip(pieces, x.split(send), strict=True):
            part.view(piece.shape).copy_(piece)
    if out is not None:
        return _all_to_all(out, x, group, send, receive, async_op)
    received = x.new_empty(sum(receive))

    def spread() -> None:
        with torch.no_grad():
            for place, part in zip(places, received.split(receive), strict=True):
                place.copy_(part.view(place.shape))

    return _all_to_all(received, x, group, send, receive, async_op, spread)


def _as_real(x: Tensor) -> Tensor:
    """Return complex numbers as pairs and bools as bytes, which backends carry; other types unchanged."""
    x = x.resolve_conj().resolve_neg()
    if x.is_complex():
        return torch.view_as_real(x)
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _described(x: Tensor) -> str:
    return f"of {list(x.shape)} {x.dtype}"


def send(x: Tensor, group: Group, dst: int, tag: int = 0, async_op: bool = False) -> Pending:
    """One message to rank `dst`: sends |x|."""
    y = carried(x, group)
    ready = Pending("send", group, y.nbytes, peer=f" to {dst}")
    return ready.start(lambda: dist.isend(y, group.ranks[dst], group=group.pg, tag=tag), async_op)


@checked_call
def recv(x: Tensor, group: Group, src: int, tag: int = 0, async_op: bool = False) -> Pending:
    """One message from rank `src` into x: sends nothing."""
    room, back = room_for(x, group)
    ready = Pending("recv", group, 0, back, f" from {src}")
    return ready.start(lambda: dist.irecv(room, group.ranks[src], group=group.pg, tag=tag), async_op)


@checked_call
def exchange(
    x: Tensor, out: Tensor, group: Group, dst: int, src: int, tag: int = 0, async_op: bool = False
) -> Pending:
    """x to rank `dst` while out comes from rank `src`: sends |x|. Empty tensors do not travel.

    Both are posted as one batch. Posted one after the other, two ranks that are each other's neighbours would wait
    for ever where a backend runs messages in order, as NCCL does.
    """
    y, (room, back) = carried(x, group), room_for(out, group)
    posts = [
        dist.P2POp(call, tensor, group.ranks[peer], group=group.pg, tag=tag)
        for call, tensor, peer in ((dist.isend, y, dst), (dist.irecv, room, src))
        if tensor.numel()
    ]
    ready = Pending("send", group, y.nbytes, back, f" to {dst}, from {src}")
    return ready.start(lambda: dist.batch_isend_irecv(posts) if posts else [], async_op)


def shift(x: Tensor, group: Group, by: int = 1) -> Tensor:
    """x of rank r-by: every rank sends to r+by and receives at once, so that no order can deadlock. Sends |x|."""
    if group.size == 1 or by % group.size == 0:
        return x.clone()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    exchange(x, out, group, (group.rank + by) % group.size, (group.rank - by) % group.size)
    return out


@checked_call
def everyones(value: T, group: Group) -> list[T]:
    """One Python object of each rank, on all ranks: for what a lesson shows; the ledger counts no bytes."""
    if group.size == 1:
        return [value]
    values: list[T] = [value] * group.size
    Pending("everyones", group, None).start(lambda: dist.all_gather_object(values, value, group=group.pg))
    return values


@checked_call
def barrier(group: Group) -> None:
    """Wait until every rank of the group is here. The ledger counts no bytes for it."""
    Pending("barrier", group, 0).start(lambda: dist.barrier(group=group.pg))
