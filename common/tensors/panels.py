"""Products on one axis of ranks in which panels travel while others are multiplied.

all-gather fused with the product       c = sum over panels p of  a[:, p] @ b[p]
product fused with the reduce-scatter   c[p] = sum over ranks of  a[p] @ b
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group, sizes_of
from common.tensors.cost import Cost, Way, moving, received
from common.tensors.layout import Layout, Partial, Replicate, Shard
from common.tensors.overlap import best_chunks
from common.tensors.pairwise import Pair
from common.tensors.rates import Rates, Term
from common.tensors.tensor import DistributedTensor, brought, to_layout
from common.tensors.transfer import bytes_sent


class _Product(torch.autograd.Function):
    """A product whose forward and backward are given as functions of pieces; the backward is differentiable."""

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


def move_then_multiply(
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
        a, b = (to_layout(x, to).local.resolve_conj().resolve_neg() for x, to in operands)
        pair.grid.meet()
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            return DistributedTensor(_Product.apply(a, b, forward, backward), layouts[2])
        return DistributedTensor(forward(a, b), layouts[2])

    return Way(name, run, whole_cost)


def rows_terms(pair: Pair) -> tuple[Term, Term, Term]:
    """Return the terms of "rows, b in panels" on the rank that has most: product, move, and overhead of a panel.

    The overhead does not depend on a panel's length: a pass over the result for each rank's rows.
    """
    n, item, dtype = pair.grid.world.size, pair.dtype.itemsize, pair.dtype
    _, m, K, N = sizes = pair.product_sizes("m")
    move = Term("all-gather", ((n - 1) * sizes_of(K, n)[0] * N * item,), hidden=True)
    return Term("product", sizes, dtype), move, Term("product", (1, m, 1, N), dtype, n)


def inner_terms(pair: Pair) -> tuple[Term, Term, Term]:
    """Return the same terms of "inner, sum in panels"; the overhead is reading b for each rank's rows."""
    n, item, dtype = pair.grid.world.size, pair.dtype.itemsize, pair.dtype
    _, M, k, N = sizes = pair.product_sizes("k")
    move = Term("reduce-scatter", ((n - 1) * sizes_of(M, n)[0] * N * item,), hidden=True)
    return Term("product", sizes, dtype), move, Term("product", (1, 1, k, N), dtype, n)


def panel_seconds(rates: Rates, product: Term, move: Term, part: Term) -> tuple[float, float, float]:
    """Return the seconds of the product, of the move, and the overhead of a panel: a message's start, and `part`."""
    overhead = rates.seconds(replace(move, sizes=(1,))) + rates.corrections.get("move", 0.0)
    return rates.seconds(product), rates.seconds(move), overhead + rates.seconds(part)


def _in_parts(move: Term, count: int) -> Term:
    return replace(move, sizes=(move.sizes[0] // count,), times=count)


def _count(pair: Pair, terms: tuple[Term, Term, Term], rows: int, panels: int | None) -> int:
    """Return the number of panels: the one that is given, or the best by the closed form of `overlap`.

    Only what a hidden move does not take from the arithmetic can be saved.
    """
    rates = pair.grid.rates
    compute, communication, overhead = panel_seconds(rates, *terms)
    saved = communication * (1 - min(1.0, rates.corrections.get("hidden", 0.0)))
    best = panels or best_chunks(compute, saved, overhead, most=16)
    return max(1, min(best, rows))


def gathered_product(a: Tensor, b: Tensor, group: Group, own: list[int], lengths: list[int]) -> Tensor:
    """Return a times all ranks' rows of b: each panel is all-gathered while the panel before is multiplied.

    own: rows of b on each rank. lengths: rows that a rank sends of its own in each panel, with zeros after its last.
    """
    n, N = group.size, b.shape[1]
    c = a.new_empty(a.shape[0], N)
    work = [b.new_empty(n * lengths[0], N) for _ in range(2)]
    begins = [sum(lengths[:i]) for i in range(len(lengths))]

    def gather(i: int) -> tuple[comm.Pending, Tensor]:
        panel, piece = work[i % 2][: n * lengths[i]], b[begins[i] :][: lengths[i]]
        if len(piece) < lengths[i]:
            piece = torch.cat([piece, b.new_zeros(lengths[i] - len(piece), N)])
        return comm.all_gather_into(panel, piece.contiguous(), group, async_op=True), panel

    ahead = gather(0)
    for i, length in enumerate(lengths):
        pending, panel = ahead
        if i + 1 < len(lengths):
            ahead = gather(i + 1)
        pending.wait()
        for r, rows in enumerate(panel.split(length)):
            width = max(0, min(length, own[r] - begins[i]))
            mine = a[:, sum(own[:r]) + begins[i] :][:, :width]
            torch.addmm(c, mine, rows[:width], beta=int(i + r > 0), out=c)  # beta 0: c is not read
    return c


def scattered_product(a: Tensor, b: Tensor, group: Group, own: list[int], lengths: list[int]) -> Tensor:
    """Return this rank's rows of the sum of all ranks' a @ b: a panel's terms are added up during the next product.

    own: rows of the result on each rank. lengths: rows of each rank in each panel.
    """
    n, N = group.size, b.shape[1]
    c = a.new_empty(own[0], N)
    work = [a.new_zeros(n * lengths[0], N) for _ in range(2)]
    under_way: list[comm.Pending] = []
    for i, length in enumerate(lengths):
        begin = sum(lengths[:i])
        if i > 1:
            under_way[i - 2].wait()  # its terms are overwritten next
        terms = work[i % 2][: n * length]
        for r, rows in enumerate(terms.split(length)):
            width = max(0, min(length, own[r] - begin))
            torch.mm(a[sum(own[:r]) + begin :][:width], b, out=rows[:width])
        target = c[begin : begin + length]
        under_way.append(comm.reduce_scatter_into(real(target), real(terms), group, async_op=True))
    for pending in under_way[-2:]:
        pending.wait()
    return c[: own[group.rank]]


def rows_in_panels(pair: Pair, panels: int | None = None) -> Way:
    """Rows of a and of b on each rank, multiplied by `gathered_product`: all ranks send all the time.

    panels: their number; default: the best.
    """
    group, (M, K), N = pair.grid.groups[0], pair.a.shape, pair.b.shape[1]
    n, item = group.size, pair.dtype.itemsize
    rows = Layout.of(pair.grid, pair.a.shape, pair.placement("m", 0, "mk"))
    split = Layout.of(pair.grid, pair.b.shape, Shard(0))
    result = Layout.of(pair.grid, (M, N), pair.placement("m", 0, "mn"))
    own = sizes_of(K, n)

    @cache
    def lengths() -> list[int]:
        return sizes_of(own[0], _count(pair, rows_terms(pair), own[-1], panels))

    def forward(a: Tensor, b: Tensor) -> Tensor:
        return gathered_product(a, b, group, own, lengths())

    def backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        whole = brought(DistributedTensor(b, split), split.placed(Replicate()), [0])
        db = to_layout(DistributedTensor(a.mH @ dc, split.placed(Partial())), split)
        return dc @ whole.mH, db.local

    def cost() -> Cost:
        (product, move, _), count = rows_terms(pair), len(lengths())
        m = product.sizes[1]
        products = Term("product", (1, m, K // (n * count) or 1, N), pair.dtype, n * count)
        memory = (result.largest + 2 * n * lengths()[0] * N) * item
        sent = Fraction(move.sizes[0])  # ranks with a row less send it as padding
        return Cost((products, _in_parts(move, count)), memory, sent)

    return move_then_multiply("rows, b in panels", pair, (rows, split, result), cost, forward, backward)


def inner_in_panels(pair: Pair, panels: int | None = None) -> Way:
    """The inner dimension split, multiplied by `scattered_product`.

    panels: their number; default: the best.
    """
    group, M, N = pair.grid.groups[0], pair.a.shape[0], pair.b.shape[1]
    n, item = group.size, pair.dtype.itemsize
    for_a, for_b, _ = pair.layouts(["k"])
    result = Layout.of(pair.grid, (M, N), Shard(0))
    own = sizes_of(M, n)

    @cache
    def lengths() -> list[int]:
        return sizes_of(own[0], _count(pair, inner_terms(pair), own[-1], panels))

    def forward(a: Tensor, b: Tensor) -> Tensor:
        return scattered_product(a, b, group, own, lengths())

    def backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        whole = brought(DistributedTensor(dc, result), result.placed(Replicate()), [0])
        return whole @ b.mH, a.mH @ whole

    def cost() -> Cost:
        (product, move, _), count = inner_terms(pair), len(lengths())
        k = product.sizes[2]
        products = Term("product", (1, M // (n * count) or 1, k, N), pair.dtype, n * count)
        memory = (own[0] * N + 2 * n * lengths()[0] * N) * item
        return Cost((products, _in_parts(move, count)), memory, Fraction(move.sizes[0]))

    return move_then_multiply("inner, sum in panels", pair, (for_a, for_b, result), cost, forward, backward)


def real(x: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones, which every backend sends."""
    return torch.view_as_real(x) if x.is_complex() else x
