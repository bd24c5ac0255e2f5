"""One long transform over all ranks, in six steps (Bailey, "FFTs in external or hierarchical memory", 1990).

The N = N1 N2 numbers are the rows of a matrix A[n1, n2], n = N2 n1 + n2, and the result is X[k], k = k1 + N1 k2:

    X[k1 + N1 k2] = sum over n2 of  w2^(n2 k2)  w^(n2 k1)  sum over n1 of  w1^(n1 k1)  A[n1, n2]

with w = exp(-2 pi i / N), w1 = w^N2, w2 = w^N1. The steps: an exchange that makes columns whole, their transforms,
the twiddle factors w^(n2 k1), an exchange that makes rows whole, their transforms, and an exchange that puts the
result in order.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch

from common.tensors.cost import Cost, moving, received
from common.tensors.layout import Layout, Shard
from common.tensors.rates import Term
from common.tensors.tensor import DistributedTensor, settled, to_layout
from common.tensors.transfer import bytes_sent


def factors(n: int) -> tuple[int, int] | None:
    """Return the factors of n nearest to its root, the smaller first; None if n is prime or 1."""
    for a in range(math.isqrt(n), 1, -1):
        if n % a == 0:
            return a, n // a
    return None


def _layouts(x: DistributedTensor, pair: tuple[int, int]) -> tuple[Layout, Layout, Layout, Layout]:
    """Return x in whole rows of A, A by rows, A by columns, and the result in whole rows of A transposed."""
    n1, n2 = pair
    rows = Layout.of(x.grid, (n1, n2), Shard(0))

    def flat(of: Layout, length: int) -> Layout:
        lengths = tuple((box[0][1] - box[0][0]) * length for box in of.boxes)
        return Layout.of(x.grid, x.shape, Shard(0, lengths))

    return flat(rows, n2), rows, rows.placed(Shard(1)), flat(Layout.of(x.grid, (n2, n1), Shard(0)), n1)


def six_steps(
    x: DistributedTensor, pair: tuple[int, int], kind: str, norm: Literal["backward", "ortho", "forward"]
) -> DistributedTensor:
    """Return the transform of a tensor of one dimension, split as x is. kind: fft or ifft. Differentiable."""
    n1, n2 = pair
    flat, rows, columns, ordered = _layouts(x, pair)
    wide = x.dtype.to_complex()
    kernel, sign = (torch.fft.fft, -2) if kind == "fft" else (torch.fft.ifft, 2)
    a = to_layout(x, flat)
    a = DistributedTensor(a.local.to(wide).view(rows.local_shape), rows)
    a = to_layout(a, columns)
    b = kernel(a.local, dim=0, norm=norm) if a.local.numel() else a.local
    lo, hi = columns.mine[1]
    turns = (torch.arange(n1)[:, None] * torch.arange(lo, hi)).to(torch.float64) / (n1 * n2)
    twiddles = torch.polar(torch.ones_like(turns), sign * math.pi * turns).to(b)
    b = b * twiddles
    c = to_layout(DistributedTensor(b, columns), rows)
    d = DistributedTensor(kernel(c.local, dim=1, norm=norm) if c.local.numel() else c.local, rows)
    d = to_layout(d, columns)  # columns of D are the rows of the result
    y = DistributedTensor(d.local.T.contiguous().view(ordered.local_shape), ordered)
    return to_layout(y, settled(x.layout))


def six_step_cost(x: DistributedTensor, pair: tuple[int, int]) -> Cost:
    """Return the cost of `six_steps`."""
    n1, n2 = pair
    flat, rows, columns, ordered = _layouts(x, pair)
    wide = x.dtype.to_complex()
    moves = (
        (x.layout, flat, x.dtype),
        (rows, columns, wide),
        (columns, rows, wide),
        (rows, columns, wide),
        (ordered, settled(x.layout), wide),
    )
    terms = [term for move in moves for term in moving(*move)]
    most = -(-n2 // x.grid.world.size), -(-n1 // x.grid.world.size)
    terms += [Term("transform", (most[0], n1, 1), wide), Term("transform", (most[1], n2, 1), wide)]
    terms.append(Term("copy", (4 * most[0] * n1 * wide.itemsize,)))
    sent = sum((bytes_sent(source, target, of.itemsize) for source, target, of in moves), Fraction(0))
    return Cost(tuple(terms), sum(received(*move) for move in moves), sent)
