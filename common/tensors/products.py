"""Matrix products: rows, columns or the inner dimension split along each axis, panels that travel meanwhile, and grids.

    c = matmul(a, b)                  # the way that costs least; the result stays split
    c = matmul(a, b, way="rows")      # this one
    c = bmm(a, b)                     # [batch, M, K] and [batch, K, N], or [K, N] for all

`pairwise` has the ways that move whole operands first, `panels` those that move panels while others are multiplied, and
`summa` those of blocks on a grid of two axes.
"""

from __future__ import annotations

from common.errors import UsageError
from common.tensors.cost import Way, choose
from common.tensors.pairwise import Pair
from common.tensors.panels import inner_in_panels, rows_in_panels
from common.tensors.summa import cannon, summa
from common.tensors.tensor import DistributedTensor, common_grid, describe, method


@method
def matmul(a: DistributedTensor, b: DistributedTensor, way: str | None = None) -> DistributedTensor:
    """Return the product of [M, K] and [K, N]; other shapes as torch.matmul takes them. Differentiable.

    way: one of those that `explain(matmul, a, b)` lists; default: the one that costs least and fits into memory.
    Raises UsageError for shapes that do not match.
    """
    return _multiplied("matmul", a, b, way)


def bmm(a: DistributedTensor, b: DistributedTensor, way: str | None = None) -> DistributedTensor:
    """Return the products of [batch, M, K] and [batch, K, N], or [K, N] for all of them. Differentiable.

    Splits the batch, rows, columns or the inner dimension. Raises UsageError for shapes that do not match.
    """
    common_grid([a, b], "bmm")
    if a.ndim != 3 or b.ndim not in (2, 3):
        raise UsageError(
            f"bmm: {list(a.shape)} and {list(b.shape)} do not match; give [b, M, K] and [b, K, N] or [K, N]"
        )
    return _multiplied("bmm", a, b, way)


def _multiplied(name: str, a: DistributedTensor, b: DistributedTensor, way: str | None) -> DistributedTensor:
    """Return torch.matmul of vectors, of matrices, and of equal or missing batch dimensions."""
    grid = common_grid([a, b], name)
    batches = "abcdefgh"
    most = max(0, a.ndim - 2, b.ndim - 2)
    if most > len(batches):
        raise UsageError(f"{name}: {most} batch dimensions; at most {len(batches)} are possible")
    of_a = (batches[:most] + "mk")[-a.ndim :] if a.ndim > 1 else "k"
    of_b = (batches[:most] + "kn")[-b.ndim :] if b.ndim > 1 else "k"
    of_c = batches[:most] + "m" * (a.ndim > 1) + "n" * (b.ndim > 1)
    lengths: dict[str, int] = {}
    for x, of in ((a, of_a), (b, of_b)):
        if not x.ndim or any(lengths.setdefault(d, n) != n for d, n in zip(of, x.shape, strict=True)):
            raise UsageError(
                f"{name}: shapes {list(a.shape)} and {list(b.shape)} do not match; give [..., M, K] and [..., K, N]"
            )
    with grid.operation(f"{name}({describe(a, b)}, {way})"):
        pair = Pair(a, b, (of_a, of_b, of_c))
        return choose(grid, name, pair.ways() + _in_blocks(pair), way, pair.key).run()


def _in_blocks(pair: Pair) -> list[Way]:
    """Return the ways that multiply panels or blocks of two matrices while others travel."""
    a, b, shape = pair.a, pair.b, pair.grid.shape
    if a.ndim != 2 or b.ndim != 2 or a.dtype != b.dtype:
        return []
    if len(shape) == 1:
        return [rows_in_panels(pair), inner_in_panels(pair)] if shape[0] > 1 else []
    if len(shape) > 2:
        return []
    square = shape[0] == shape[1] and not any(n % shape[0] for n in (*a.shape, *b.shape))
    return [summa(pair), *([cannon(pair)] if square else [])]
