"""Products on one axis of ranks in which panels travel while others are multiplied.

all-gather fused with the product       c = sum over panels p of  a[:, p] @ b[p]
product fused with the reduce-scatter   c[p] = sum over ranks of  a[p] @ b
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import sizes_of
from common.tensors.cost import Cost, Way, moving, received
from common.tensors.layout import Layout, Partial, Replicate, Shard, size_of
from common.tensors.overlap import best_chunks
from common.tensors.pairwise import Pair
from common.tensors.rates import Rates, Term
from common.tensors.tensor import DistributedTensor, to_layout
from common.tensors.transfer import bytes_sent, moved


class _Product(torch.autograd.Function):
    """A product whose forward and backward are given as functions of whole pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        forward: Callable[[Tensor, Tensor], Tensor],
        backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.gradients = backward
        return forward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        da, db = ctx.gradients(*ctx.saved_tensors, grads[0])
        return da, db, None, None


def made(
    name: str,
    pair: Pair,
    layouts: tuple[Layout, Layout, Layout],
    cost: Callable[[], Cost],
    forward: Callable[[Tensor, Tensor], Tensor],
    backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Way:
    """Return a way that brings a and b into their layouts and then multiplies them by `forward`, which costs `cost`."""
    operands = ((pair.a, layouts[0]), (pair.b, layouts[1]))

    def whole_cost() -> Cost:
        own, moves = cost(), [(x.layout, to, x.dtype) for x, to in operands]
        return Cost(
            (*(term for move in moves for term in moving(*move)), *own.terms),
            own.memory + sum(received(*move) for move in moves),
            own.sent + sum((bytes_sent(x, to, of.itemsize) for x, to, of in moves), Fraction(0)),
        )

    def run() -> DistributedTensor:
        a, b = (to_layout(x, to).local for x, to in operands)
        pair.grid.meet()
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            return DistributedTensor(_Product.apply(a, b, forward, backward), layouts[2])
        return DistributedTensor(forward(a, b), layouts[2])

    return Way(name, run, whole_cost)


def times(rates: Rates, product: Term, move: Term, part: Term) -> tuple[float, float, float]:
    """Return the seconds of the product, of the move, and the overhead of a panel.

    The overhead is the start of its message, and what its products cost at any length: `part`.
    """
    overhead = rates.seconds(replace(move, sizes=(1,))) + rates.corrections.get("move", 0.0)
    return rates.seconds(product), rates.seconds(move), overhead + rates.seconds(part)


def _in_parts(move: Term, count: int) -> Term:
    return replace(move, sizes=(move.sizes[0] // count,), times=count)


def _count(pair: Pair, product: Term, move: Term, part: Term, rows: int, panels: int | None) -> int:
    """Return the number of panels: the one that is given, or the best by the closed form of `overlap`."""
    best = panels or best_chunks(*times(pair.grid.rates, product, move, part), most=16)
    return max(1, min(best, rows))


def rows_in_panels(pair: Pair, panels: int | None = None) -> Way:
    """Rows of a and of b on each rank: b is all-gathered panel by panel while the panel before is multiplied.

    A panel is a run of each rank's rows of b, so that all ranks send all the time. panels: their number; default: best.
    """
    group, (M, K), N = pair.grid.groups[0], pair.a.shape, pair.b.shape[1]
    n, item, dtype = group.size, pair.dtype.itemsize, pair.dtype
    rows = Layout.of(pair.grid, pair.a.shape, pair.placement("m", 0, "mk"))
    split = Layout.of(pair.grid, pair.b.shape, Shard(0))
    result = Layout.of(pair.grid, (M, N), pair.placement("m", 0, "mn"))
    own = sizes_of(K, n)
    product = Term("product", (1, max(rows.box(r)[0][1] - rows.box(r)[0][0] for r in range(n)), K, N), dtype)
    move = Term("all-gather", ((n - 1) * own[0] * N * item,), hidden=True)
    part = replace(
        product, sizes=(1, product.sizes[1], 1, N), times=n
    )  # a pass over the result for each rank's rows
    count = _count(pair, product, move, part, own[-1], panels)
    lengths = sizes_of(own[0], count)
    sent = Fraction((n - 1) * own[0] * N * item)  # ranks with a row less send it as padding
    starts = [sum(own[:r]) for r in range(n)]

    def forward(a: Tensor, b: Tensor) -> Tensor:
        c = a.new_empty(a.shape[0], N)
        work = [b.new_empty(n * lengths[0], N) for _ in range(2)]
        under_way: list[tuple[comm.Pending, Tensor, Tensor, int, int]] = []
        begin, first = 0, True

        def multiply() -> None:
            nonlocal first
            pending, panel, _, at, length = under_way.pop(0)
            pending.wait()
            for r in range(n):
                width = max(0, min(length, own[r] - at))
                mine, theirs = a[:, starts[r] + at : starts[r] + at + width], panel[r * length :][:width]
                if first:
                    torch.mm(mine, theirs, out=c)
                else:
                    c.addmm_(mine, theirs)
                first = False

        for i, length in enumerate(lengths):
            piece = b[begin : begin + length]
            if len(piece) < length:
                piece = torch.cat([piece, b.new_zeros(length - len(piece), N)])
            piece = piece.contiguous()
            panel = work[i % 2][: n * length]
            pending = comm.all_gather_into(panel, piece, group, async_op=True)
            under_way.append((pending, panel, piece, begin, length))
            begin += length
            if i:
                multiply()
        multiply()
        return c

    def backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        whole = moved(b, split, split.placed(Replicate()))
        db = moved(a.mH @ dc, split.placed(Partial()), split)
        return dc @ whole.mH, db

    parts = n * count
    terms = Term("product", (1, product.sizes[1], K // parts or 1, N), dtype, parts), _in_parts(move, count)
    memory = (size_of(result.box(0)) + 2 * n * lengths[0] * N) * item
    return made(
        "rows, b in panels", pair, (rows, split, result), lambda: Cost(terms, memory, sent), forward, backward
    )


def inner_in_panels(pair: Pair, panels: int | None = None) -> Way:
    """The inner dimension split: each rank's terms of a panel of rows are added up while the next are multiplied.

    panels: their number; default: the best.
    """
    group, M, N = pair.grid.groups[0], pair.a.shape[0], pair.b.shape[1]
    n, item, dtype = group.size, pair.dtype.itemsize, pair.dtype
    for_a, for_b, _ = pair.layouts(["k"])
    result = Layout.of(pair.grid, (M, N), Shard(0))
    own = sizes_of(M, n)
    longest = max(for_a.box(r)[1][1] - for_a.box(r)[1][0] for r in range(n))
    product = Term("product", (1, M, longest, N), dtype)
    move = Term("reduce-scatter", ((n - 1) * own[0] * N * item,), hidden=True)
    part = replace(product, sizes=(1, 1, longest, N), times=n)  # b is read for each rank's rows
    count = _count(pair, product, move, part, own[-1], panels)
    lengths = sizes_of(own[0], count)
    sent = Fraction((n - 1) * own[0] * N * item)
    starts = [sum(own[:r]) for r in range(n)]

    def forward(a: Tensor, b: Tensor) -> Tensor:
        c = a.new_empty(own[0], N)
        work = [a.new_zeros(n * lengths[0], N) for _ in range(2)]
        under_way: list[comm.Pending] = []
        begin = 0
        for i, length in enumerate(lengths):
            if i > 1:
                under_way[i - 2].wait()  # its terms are overwritten next
            terms = work[i % 2][: n * length]
            for r in range(n):
                width = max(0, min(length, own[r] - begin))
                torch.mm(a[starts[r] + begin : starts[r] + begin + width], b, out=terms[r * length :][:width])
            target = c[begin : begin + length]
            under_way.append(comm.reduce_scatter_into(real(target), real(terms), group, async_op=True))
            begin += length
        for pending in under_way[-2:]:
            pending.wait()
        return c[: own[group.rank]]

    def backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        whole = moved(dc.contiguous(), result, result.placed(Replicate()))
        return whole @ b.mH, a.mH @ whole

    parts = n * count
    terms = Term("product", (1, M // parts or 1, longest, N), dtype, parts), _in_parts(move, count)
    memory = (own[0] * N + 2 * n * lengths[0] * N) * item
    return made(
        "inner, sum in panels",
        pair,
        (for_a, for_b, result),
        lambda: Cost(terms, memory, sent),
        forward,
        backward,
    )


def real(x: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, which every backend sends."""
    return torch.view_as_real(x) if x.is_complex() else x
