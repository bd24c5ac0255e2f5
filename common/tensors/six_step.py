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

from common.tensors.cost import Cost, moving
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

    def transformed(y: DistributedTensor, dim: int) -> torch.Tensor:
        return kernel(y.local, dim=dim, norm=norm) if y.local.numel() else y.local

    y = to_layout(x, flat)
    y = DistributedTensor(y.local.to(wide).view(rows.local_shape), rows)
    y = to_layout(y, columns)
    twiddles = _twiddles(n1, columns.mine[1], sign * math.pi / (n1 * n2)).to(y.local)
    y = DistributedTensor(transformed(y, 0) * twiddles, columns)
    y = to_layout(y, rows)
    y = DistributedTensor(transformed(y, 1), rows)
    y = to_layout(y, columns)  # whose columns are the rows of the result
    y = DistributedTensor(y.local.T.contiguous().view(ordered.local_shape), ordered)
    return to_layout(y, settled(x.layout))


def _twiddles(rows: int, columns: tuple[int, int], angle: float) -> torch.Tensor:
    """Return exp(i k n angle) for k < rows and n in [columns), [rows, columns] complex128."""
    k, n = torch.arange(rows, dtype=torch.float64), torch.arange(*columns, dtype=torch.float64)
    return torch.polar(torch.ones((), dtype=torch.float64), torch.outer(k, n).mul_(angle))


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
    # at once: a piece, its transforms, the twiddle factors, and their product
    return Cost(tuple(terms), 4 * columns.largest * wide.itemsize, sent)
