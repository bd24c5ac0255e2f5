"""Counted communication without autograd: what every differentiable collective and every optimizer is built on.

Each function takes the group it talks in, adds a row to the ledger, and returns at once when the group
has one rank. Sources and destinations are ranks *inside* the group. Ranks that share a GPU talk over gloo, and what
lies on the GPU travels through the host's memory.

Sizes: n ranks in the group, S bytes of the whole tensor. "Sends" is per rank, the mean over the group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from common import ledger

T = TypeVar("T")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
TREE_TAG = 1 << 30  # no message of a chapter has it

# What this rank is blocked in right now; the watchdog shows it when a run hangs.
blocked_in: dict[str, object] = {}


@dataclass(frozen=True)
class Group:
    """The ranks that talk along one axis.

    `ranks` are global ranks in order, `rank` is this rank's place among them; `pg` is None for one rank.
    """

    axis: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    pg: dist.ProcessGroup | None = None


@dataclass
class Pending:
    """Communication under way; `wait()` blocks until it is done and adds its row to the ledger."""

    op: str
    group: Group
    sent: Fraction | int
    peer: str = ""
    work: dist.Work | None = None
    seconds: float = 0.0
    finish: Callable[[], object] = lambda: None
    call: Callable[[], dist.Work | None] | None = None  # holds what travels until it is there

    def wait(self) -> None:
        """Block until done; seconds blocked here are the exposed part of the communication."""
        if self.work is not None:
            self._blocked(self._complete)
            ledger.record(self.op, self.group.axis, self.sent, self.seconds)
            self.work = self.call = None
            self.finish = lambda: None

    def _complete(self) -> None:
        assert self.work is not None
        self.work.wait()
        self.finish()

    def _blocked(self, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        blocked_in.update(op=self.op + self.peer, axis=self.group.axis, since=start)
        result = call()  # where it raises, blocked_in keeps saying where this rank stood
        blocked_in.clear()
        self.seconds += time.perf_counter() - start
        return result

    def start(self, call: Callable[[], dist.Work | None]) -> None:
        """Hand the work to the process group; some backends block already here."""
        self.call = call
        self.work = self._blocked(call)


def _run(
    call: Callable[[], dist.Work | None],
    op: str,
    group: Group,
    sent: Fraction | int,
    async_op: bool = False,
    peer: str = "",
    finish: Callable[[], object] = lambda: None,
) -> Pending:
    pending = Pending(op, group, sent, peer, finish=finish)
    if group.size > 1:
        pending.start(call)
    if not async_op:
        pending.wait()
    return pending


def share(x: Tensor, times: int, group: Group) -> Fraction:
    """`times` * (n-1)/n of the bytes of x: what one of n ranks sends when the total is times * (n-1) * S."""
    return Fraction(times * (group.size - 1) * x.numel() * x.element_size(), group.size)


def over_host(x: Tensor, group: Group) -> bool:
    """Whether x must travel in the host's memory: of the backends NCCL alone carries a GPU's, in every call."""
    return x.is_cuda and group.pg is not None and dist.get_backend(group.pg) != "nccl"


def _carried(x: Tensor, group: Group) -> Tensor:
    """What travels for x: libraries take memory as it lies, gaps and all."""
    with torch.no_grad():
        return x.to("cpu", copy=True).contiguous() if over_host(x, group) else x.contiguous()


def _into(x: Tensor, y: Tensor) -> Callable[[], object]:
    """How what came in y gets into x."""

    def copy() -> None:
        with torch.no_grad():
            x.copy_(y)

    return (lambda: None) if y is x else copy


def _in_place(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """What travels for x, and how it gets back into x."""
    y = _carried(x, group)
    return y, _into(x, y)


def _room(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """Where what comes for x can be put, and how it gets into x from there."""
    y, host = x, over_host(x, group)
    if host or not x.is_contiguous():
        y = torch.empty(x.shape, dtype=x.dtype, device="cpu" if host else x.device)
    return y, _into(x, y)


def all_reduce(x: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Pending:
    """In place: P(x) to R(x). Sends 2(n-1)/n S (ring: reduce-scatter, then all-gather)."""
    y, back = _in_place(x, group)
    return _run(
        lambda: dist.all_reduce(y, OPS[op], group=group.pg, async_op=True),
        "all_reduce",
        group,
        share(x, 2, group),
        async_op,
        finish=back,
    )


def broadcast(x: Tensor, group: Group, src: int = 0, async_op: bool = False) -> Pending:
    """In place: x of rank `src` to R(x). Sends (n-1)/n S."""
    y, back = _in_place(x, group)
    return _run(
        lambda: dist.broadcast(y, group.ranks[src], group=group.pg, async_op=True),
        "broadcast",
        group,
        share(x, 1, group),
        async_op,
        finish=back,
    )


def _adds_itself(group: Group) -> bool:
    """Whether reduce and reduce-scatter are ours: gloo's own send 1.25 to 1.5 times and 2 times what is needed."""
    return group.pg is not None and dist.get_backend(group.pg) == "gloo"


class _Tree:
    """A reduce as a binomial tree: in each round half of the ranks that are left send their sums, and are done.

    Counted from `dst`, 6 ranks send 1->0 3->2 5->4, then 2->0, then 4->0: each but the first sends S once.
    """

    def __init__(self, x: Tensor, group: Group, dst: int) -> None:
        self.x, self.group, self.dst = x, group, dst

    @torch.no_grad()
    def wait(self) -> None:
        n, x = self.group.size, self.x
        rank, term = (self.group.rank - self.dst) % n, torch.empty_like(x)
        for step in (2**k for k in range((n - 1).bit_length())):
            other = self.group.ranks[((rank ^ step) + self.dst) % n]
            if rank & step:
                dist.send(x, other, group=self.group.pg, tag=TREE_TAG)
                return
            if rank + step < n:
                dist.recv(term, other, group=self.group.pg, tag=TREE_TAG)
                x += term


def _add_up(out: Tensor, terms: Tensor, n: int) -> None:
    """out = the sum of the n pieces of `terms`, in their order; half types are added in float32 and rounded once."""
    with torch.no_grad():
        total, *others = terms.chunk(n)
        total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        for term in others:
            total += term
        out.copy_(total.view_as(out))


def reduce(x: Tensor, group: Group, dst: int = 0) -> None:
    """In place: P(x) to the sum on rank `dst`; the contents of x on other ranks are undefined. Sends (n-1)/n S."""
    y, back = _in_place(x, group)
    _run(
        lambda: (
            cast(dist.Work, _Tree(y, group, dst))
            if _adds_itself(group)
            else dist.reduce(y, group.ranks[dst], group=group.pg, async_op=True)
        ),
        "reduce",
        group,
        share(x, 1, group),
        finish=back,
    )


def sizes_of(total: int, parts: int) -> list[int]:
    """Sizes of `parts` pieces of `total` that differ by one at the most, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def padded(total: int, parts: int) -> int:
    """What `parts` pieces of `total` take when all are as long as the longest: so uneven pieces are gathered."""
    return parts * max(sizes_of(total, parts))


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x with dimension `dim` first, filled with zeros to `size`: collectives want equal pieces."""
    x = x.movedim(dim, 0)
    if x.shape[0] < size:
        x = torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])
    return x.contiguous()


def all_gather(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """S(x on dim) to R: the pieces of all ranks joined along `dim`. Sends (n-1)/n S, S of the result.

    sizes: each rank's length along `dim` where they differ; the shorter ones travel padded.
    """
    if group.size == 1:
        return x
    sizes = sizes or [x.shape[dim]] * group.size
    piece = _padded(x, dim, max(sizes))
    out = piece.new_empty(group.size * max(sizes), *piece.shape[1:])
    all_gather_into(out, piece, group)
    pieces = [p[:size] for p, size in zip(out.chunk(group.size), sizes, strict=True)]
    return torch.cat(pieces).movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """P(x) to S(x on dim): this rank's piece of the sum. Sends (n-1)/n S.

    sizes: each rank's length along `dim`, as `sizes_of` cuts when absent; the shorter ones travel padded.
    """
    if group.size == 1:
        return x
    sizes = list(sizes or sizes_of(x.shape[dim], group.size))
    longest = max(sizes)
    pieces = torch.cat([_padded(p, dim, longest) for p in torch.split(x, sizes, dim)])
    out = pieces.new_empty(longest, *pieces.shape[1:])
    reduce_scatter_into(out, pieces, group)
    return out[: sizes[group.rank]].movedim(0, dim).contiguous()


def all_gather_into(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Pending:
    """S(x on dimension 0) to R(out), pieces of equal length; x may be this rank's place in out. Sends (n-1)/n S.

    Both are contiguous: nothing is copied on the way. Raises ValueError where x does not fill out n times.
    """
    _check_pieces("all_gather_into", out, x, group)
    if group.size == 1:
        out.copy_(x.view_as(out))
    y, (room, back) = _carried(x, group), _room(out, group)
    return _run(
        lambda: dist.all_gather_single(room.view(-1), y.view(-1), group=group.pg, async_op=True),
        "all_gather",
        group,
        share(out, 1, group),
        async_op,
        finish=back,
    )


def reduce_scatter_into(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> Pending:
    """P(x) to S(out on dimension 0), pieces of equal length; out may be this rank's place in x. Sends (n-1)/n S.

    Both are contiguous: nothing is copied on the way. Raises ValueError where out does not fill x n times.
    On gloo an all-to-all carries the terms, and wait() adds them in the order of the ranks.
    """
    _check_pieces("reduce_scatter_into", x, out, group)
    if group.size == 1:
        out.copy_(x.view_as(out))
    y, call = _carried(x, group).view(-1), dist.reduce_scatter_single  # type: Tensor, Callable[..., dist.Work | None]
    room, finish = _room(out, group)
    if _adds_itself(group):
        call, room = dist.all_to_all_single, torch.empty_like(y)
        finish = partial(_add_up, out, room, group.size)
    return _run(
        lambda: call(room.view(-1), y, group=group.pg, async_op=True),
        "reduce_scatter",
        group,
        share(x, 1, group),
        async_op,
        finish=finish,
    )


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
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    send, receive = list(send_sizes), list(receive_sizes)
    y, (room, back) = _carried(x, group), _room(out, group)
    return _run(
        lambda: dist.all_to_all_single(room, y, receive, send, group=group.pg, async_op=True),
        "all_to_all",
        group,
        (sum(send) - send[group.rank]) * row_bytes,
        async_op,
        finish=back,
    )


def gather(x: Tensor, group: Group, dst: int = 0) -> list[Tensor] | None:
    """Every rank's x as a list on rank `dst`, None elsewhere. Sends S on all ranks but `dst`."""
    if group.size == 1:
        return [x]
    y = _carried(x, group)
    out = [torch.empty_like(y) for _ in group.ranks] if group.rank == dst else None
    _run(
        lambda: dist.gather(y, out, group.ranks[dst], group=group.pg, async_op=True),
        "gather",
        group,
        x.numel() * x.element_size() * (group.rank != dst),
    )
    return out and [piece.to(x.device) for piece in out]


def scatter(pieces: Sequence[Tensor] | None, out: Tensor, group: Group, src: int = 0) -> Tensor:
    """Piece j of rank `src` to rank j, into `out`. Rank `src` sends all pieces but its own."""
    if group.size == 1:
        return out.copy_(pieces[0]) if pieces else out
    given = [_carried(p, group) for p in pieces] if pieces and group.rank == src else None
    room, back = _room(out, group)
    _run(
        lambda: dist.scatter(room, given, group.ranks[src], group=group.pg, async_op=True),
        "scatter",
        group,
        (group.size - 1) * out.numel() * out.element_size() * (group.rank == src),
        finish=back,
    )
    return out


def send(x: Tensor, group: Group, dst: int, tag: int = 0, async_op: bool = False) -> Pending:
    """One message to rank `dst`: sends S."""
    y = _carried(x, group)
    return _run(
        lambda: dist.isend(y, group.ranks[dst], group=group.pg, tag=tag),
        "send",
        group,
        x.numel() * x.element_size(),
        async_op,
        peer=f" to {dst}",
    )


def recv(x: Tensor, group: Group, src: int, tag: int = 0, async_op: bool = False) -> Pending:
    """One message from rank `src` into x: sends nothing."""
    room, back = _room(x, group)
    return _run(
        lambda: dist.irecv(room, group.ranks[src], group=group.pg, tag=tag),
        "recv",
        group,
        0,
        async_op,
        peer=f" from {src}",
        finish=back,
    )


class _All:
    """Several messages as one: NCCL, and any backend that batches, may give fewer than were posted."""

    def __init__(self, posts: list[dist.P2POp]) -> None:
        self.posts = posts  # holds the tensors until they have left
        self.works = dist.batch_isend_irecv(posts) if posts else []

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def exchange(
    x: Tensor, out: Tensor, group: Group, dst: int, src: int, tag: int = 0, async_op: bool = False
) -> Pending:
    """x to rank `dst` while out comes from rank `src`: sends S. Empty tensors do not travel.

    Both are posted as one batch. Posted one after the other, two ranks that are each other's neighbours would wait
    for ever where a backend runs messages in order, as NCCL does.
    """
    y, (room, back) = _carried(x, group), _room(out, group)
    posts = [
        dist.P2POp(call, tensor, group.ranks[peer], group=group.pg, tag=tag)
        for call, tensor, peer in ((dist.isend, y, dst), (dist.irecv, room, src))
        if tensor.numel()
    ]
    return _run(
        lambda: cast(dist.Work, _All(posts)),
        "send",
        group,
        x.numel() * x.element_size(),
        async_op,
        peer=f" to {dst}, from {src}",
        finish=back,
    )


def shift(x: Tensor, group: Group, by: int = 1) -> Tensor:
    """x of rank r-by: every rank sends to r+by and receives at once, so that no order can deadlock. Sends S."""
    if group.size == 1 or by % group.size == 0:
        return x.clone()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    exchange(x, out, group, (group.rank + by) % group.size, (group.rank - by) % group.size)
    return out


def everyones(value: T, group: Group) -> list[T]:
    """One Python object of each rank, on all ranks: for what a lesson shows; the ledger counts no bytes."""
    if group.size == 1:
        return [value]
    values: list[T] = [value] * group.size
    _run(lambda: dist.all_gather_object(values, value, group=group.pg), "everyones", group, 0)
    return values


def barrier(group: Group) -> None:
    """Wait until every rank of the group is here. The ledger counts no bytes for it."""
    _run(lambda: dist.barrier(group=group.pg, async_op=True), "barrier", group, 0)
