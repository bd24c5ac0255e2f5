"""Products of blocks on a grid of two axes: SUMMA, and on square grids Cannon's algorithm.

    rank (i, j) holds a[i, j], b[i, j] and makes c[i, j] = sum over k of a[i, k] @ b[k, j]

SUMMA broadcasts a[i, k] along row i and b[k, j] along column j for each k. Cannon's algorithm sends blocks to
neighbours only: a one place to the left, b one place up, after each product.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from common import comm
from common.comm import Group, sizes_of
from common.tensors.cost import Cost, Way
from common.tensors.layout import Layout, Replicate, Shard
from common.tensors.pairwise import Pair
from common.tensors.panels import move_then_multiply, real
from common.tensors.rates import Term
from common.tensors.tensor import DistributedTensor, brought, to_layout


def _blocks(pair: Pair) -> tuple[Layout, Layout, Layout]:
    """Return blocks of a, b and c on a grid of two axes."""
    (M, K), N = pair.a.shape, pair.b.shape[1]
    found = [Layout.of(pair.grid, s, (Shard(0), Shard(1))) for s in ((M, K), (K, N), (M, N))]
    return found[0], found[1], found[2]


def _block_backward(
    pair: Pair, layouts: tuple[Layout, Layout, Layout]
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the backward of blocks: each rank multiplies a row of blocks of one by a column of the other."""
    a_l, b_l, c_l = layouts
    whole_rows = (Shard(0), Replicate())
    whole_columns = (Replicate(), Shard(1))

    def backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        def block(x: DistributedTensor, y: DistributedTensor) -> Tensor:
            left = brought(x, x.layout.placed(*whole_rows), [1])
            return left @ brought(y, y.layout.placed(*whole_columns), [0])

        def flipped(x: Tensor, layout: Layout) -> DistributedTensor:
            lies = Layout.of(pair.grid, layout.shape[::-1], (Shard(1), Shard(0)))
            return to_layout(DistributedTensor(x.mH, lies), lies.placed(Shard(0), Shard(1)))

        gradient = DistributedTensor(dc, c_l)
        return block(gradient, flipped(b, b_l)), block(flipped(a, a_l), gradient)

    return backward


def summa(pair: Pair) -> Way:
    """SUMMA: for each run of the inner dimension its owners broadcast columns of a along rows of the grid, and rows of
    b along columns (van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm", 1997).

    The next panels travel while these are multiplied.
    """
    layouts = _blocks(pair)
    (M, K), N, (rows, columns) = pair.a.shape, pair.b.shape[1], pair.grid.shape
    down, along = pair.grid.groups
    m, n, item = sizes_of(M, rows)[0], sizes_of(N, columns)[0], pair.dtype.itemsize
    ends = sorted({*_ends(sizes_of(K, rows)), *_ends(sizes_of(K, columns))})
    steps = [(lo, hi) for lo, hi in zip([0, *ends], ends, strict=False) if hi > lo]
    mine_m, mine_n = layouts[2].local_shape

    def forward(a: Tensor, b: Tensor) -> Tensor:
        c = a.new_zeros(a.shape[0], b.shape[1])
        k_a, k_b = layouts[0].mine[1][0], layouts[1].mine[0][0]

        def post(lo: int, hi: int) -> tuple[Tensor, Tensor, list[comm.Pending]]:
            from_a, from_b = _owner(sizes_of(K, columns), lo), _owner(sizes_of(K, rows), lo)
            left = a[:, lo - k_a : hi - k_a] if along.rank == from_a else a.new_empty(a.shape[0], hi - lo)
            right = b[lo - k_b : hi - k_b] if down.rank == from_b else b.new_empty(hi - lo, b.shape[1])
            left, right = left.contiguous(), right.contiguous()
            sends = [(left, along, from_a), (right, down, from_b)]
            return left, right, [_sent_to_all(x, g, src) for x, g, src in sends if x.numel()]

        ahead = post(*steps[0]) if steps else None
        for i in range(len(steps)):
            assert ahead is not None
            left, right, pending = ahead
            for p in pending:
                p.wait()
            ahead = post(*steps[i + 1]) if i + 1 < len(steps) else None
            c.addmm_(left, right)
        return c

    sent = Fraction((columns - 1) * mine_m * K * item, columns) + Fraction(
        (rows - 1) * K * mine_n * item, rows
    )
    moves = (
        Term("all-gather", ((columns - 1) * m * K * item // columns,), hidden=True),
        Term("all-gather", ((rows - 1) * K * n * item // rows,), hidden=True),
    )
    terms = (
        Term("product", (1, m, max(1, K // max(1, len(steps))), n), pair.dtype, max(1, len(steps))),
        *moves,
    )
    widest = max((hi - lo for lo, hi in steps), default=0)
    memory = (m * n + 2 * (m + n) * widest) * item
    return move_then_multiply(
        "summa", pair, layouts, lambda: Cost(terms, memory, sent), forward, _block_backward(pair, layouts)
    )


def _sent_to_all(x: Tensor, group: Group, src: int) -> comm.Pending:
    return comm.broadcast(real(x), group, src, async_op=True)


def _ends(sizes: list[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]


def _owner(sizes: list[int], at: int) -> int:
    return next(i for i, end in enumerate(_ends(sizes)) if at < end)


def cannon(pair: Pair) -> Way:
    """Cannon's algorithm on a square grid: blocks of a go left and blocks of b go up, one place after each product
    (Cannon, "A cellular computer to implement the Kalman filter algorithm", 1969).

    Blocks are equal, so that each rank holds one block of each at any time. The next blocks travel meanwhile.
    """
    layouts = _blocks(pair)
    (M, K), N, q = pair.a.shape, pair.b.shape[1], pair.grid.shape[0]
    down, along = pair.grid.groups
    m, k, n, item = M // q, K // q, N // q, pair.dtype.itemsize
    row, column = pair.grid.place

    def shifted(x: Tensor, group: Group, by: int) -> tuple[Tensor, comm.Pending | None]:
        if not by % group.size or not x.numel():
            return x, None
        out, x = torch.empty_like(x), x.contiguous()
        to, source = (group.rank - by) % group.size, (group.rank + by) % group.size
        return out, comm.exchange(real(x), real(out), group, to, source, async_op=True)

    def forward(a: Tensor, b: Tensor) -> Tensor:
        c = a.new_zeros(m, n)
        ahead = shifted(a.contiguous(), along, row), shifted(b.contiguous(), down, column)
        for step in range(q):
            for _, pending in ahead:
                if pending is not None:
                    pending.wait()
            a, b = ahead[0][0], ahead[1][0]
            if step + 1 < q:
                ahead = shifted(a, along, 1), shifted(b, down, 1)
            c.addmm_(a, b)
        return c

    first = (m * k if row % q else 0) + (k * n if column % q else 0)
    sent = Fraction((first + (q - 1) * (m * k + k * n)) * item)
    moves = (
        Term("exchange", ((m * k + k * n) * item, 2)),
        Term("exchange", ((m * k + k * n) * item, 2), times=max(1, q - 1), hidden=True),
    )
    terms = (Term("product", (1, m, k, n), pair.dtype, q), *moves)
    memory = (m * n + 2 * (m * k + k * n)) * item
    return move_then_multiply(
        "cannon", pair, layouts, lambda: Cost(terms, memory, sent), forward, _block_backward(pair, layouts)
    )
