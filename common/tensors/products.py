"""Matrix products: rows, columns or the inner dimension split along each axis, panels that travel meanwhile, and grids.

    c = matmul(a, b)                  # the way that costs least; the result stays split
    c = matmul(a, b, way="rows")      # this one
    c = bmm(a, b)                     # [batch, M, K] and [batch, K, N], or [K, N] for all

`pairwise` has the ways that move whole operands first, `panels` those that move panels while others are multiplied, and
`summa` those of blocks on a grid of two axes.
"""

from __future__ import annotations

from collections.abc import Hashable

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
    if a.ndim != 2 or b.ndim != 2:
        return _with_batches(a, b, way)
    grid = common_grid([a, b], "matmul")
    with grid.operation(f"matmul({describe(a, b)}, {way})"):
        return choose(grid, "matmul", _matmul_ways(a, b), way, _key(a, b)).run()


def bmm(a: DistributedTensor, b: DistributedTensor, way: str | None = None) -> DistributedTensor:
    """Return the products of [batch, M, K] and [batch, K, N], or [K, N] for all of them. Differentiable.

    Splits the batch, rows, columns or the inner dimension. Raises UsageError for shapes that do not match.
    """
    grid = common_grid([a, b], "bmm")
    with grid.operation(f"bmm({describe(a, b)}, {way})"):
        return choose(grid, "bmm", _bmm_ways(a, b), way, _key(a, b)).run()


def _key(a: DistributedTensor, b: DistributedTensor) -> Hashable:
    return a.layout, b.layout, a.dtype, b.dtype


def _bmm_ways(a: DistributedTensor, b: DistributedTensor) -> list[Way]:
    """Return the ways of `bmm`."""
    if (
        a.ndim != 3
        or b.ndim not in (2, 3)
        or a.shape[2] != b.shape[-2]
        or a.shape[0] != (*b.shape, a.shape[0])[b.ndim == 2 and 2]
    ):
        raise UsageError(
            f"bmm: {list(a.shape)} and {list(b.shape)} do not match; give [b, M, K] and [b, K, N] or [K, N]"
        )
    return Pair(a, b, ("xmk", "xkn" if b.ndim == 3 else "kn", "xmn")).ways()


def _with_batches(a: DistributedTensor, b: DistributedTensor, way: str | None) -> DistributedTensor:
    """Return torch.matmul of vectors, and of equal or missing batch dimensions."""
    names = "abcdefgh"
    batches = [x.shape[: max(0, x.ndim - 2)] for x in (a, b)]
    most = max(map(len, batches))
    if most > len(names):
        raise UsageError(f"matmul: {most} batch dimensions; at most {len(names)} are possible")
    labels = [names[most - len(s) : most] for s in batches]
    of_a = labels[0] + ("mk" if a.ndim > 1 else "k")
    of_b = labels[1] + ("kn" if b.ndim > 1 else "k")
    of_c = names[:most] + ("m" if a.ndim > 1 else "") + ("n" if b.ndim > 1 else "")
    lengths: dict[str, int] = {}
    for x, of in ((a, of_a), (b, of_b)):
        if (
            not x.ndim
            or most > len(names)
            or any(lengths.setdefault(d, n) != n for d, n in zip(of, x.shape, strict=True))
        ):
            raise UsageError(f"matmul: shapes {list(a.shape)} and {list(b.shape)} do not match")
    grid = common_grid([a, b], "matmul")
    with grid.operation(f"matmul({describe(a, b)}, {way})"):
        pair = Pair(a, b, (of_a, of_b, of_c))
        return choose(grid, "matmul", pair.ways(), way, pair.key).run()


def _matmul_ways(a: DistributedTensor, b: DistributedTensor) -> list[Way]:
    """Return the ways of `matmul` of two matrices."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise UsageError(
            f"matmul: shapes {list(a.shape)} and {list(b.shape)} do not match; give [M, K] and [K, N]"
        )
    pair = Pair(a, b, ("mk", "kn", "mn"))
    ways = pair.ways()
    shape = a.grid.shape
    if a.dtype == b.dtype and len(shape) == 1 and shape[0] > 1:
        ways += [rows_in_panels(pair), inner_in_panels(pair)]
    if a.dtype == b.dtype and len(shape) == 2:
        ways.append(summa(pair))
        if shape[0] == shape[1] and not any(n % shape[0] for n in (*a.shape, *b.shape)):
            ways.append(cannon(pair))
    return ways
