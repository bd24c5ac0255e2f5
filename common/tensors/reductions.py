"""Sums, means, largest and smallest numbers, their places, and norms, along any dimensions.

    total = sum(x, 0)             # lies split, or as terms of a sum where `x` was split along the dimension
    top = max(x, (0, 2))          # replicated along an axis of ranks that cuts a dimension that is reduced

Each rank reduces its piece. Along an axis of ranks that cuts a reduced dimension the ranks then hold one term each: a
sum stays that way, as Partial(), until something needs it; the largest of the terms is found by an all-reduce. All
follow torch for NaN, for empty tensors and, among equal numbers, in their gradients.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from common import comm
from common.comm.collectives import linear_map
from common.errors import UsageError
from common.tensors.layout import Layout, Partial, Placement, Replicate, Shard, integers
from common.tensors.tensor import DistributedTensor, describe, method, settled, to_layout

Dims = int | Sequence[int] | None
HALF = (torch.float16, torch.bfloat16)
ROWS = 64  # rows that are added by one product


def _dims(x: DistributedTensor, dim: Dims, operation: str) -> list[int]:
    """Return the dimensions to reduce, none negative, rising. Raises UsageError."""
    given = range(x.ndim) if dim is None else integers(dim, f"{operation}: dimension")
    if bad := [d for d in given if not -builtins.max(x.ndim, 1) <= d < builtins.max(x.ndim, 1)]:
        raise UsageError(f"{operation}: dimension {bad[0]} of a tensor with {x.ndim}")
    found = sorted(d % builtins.max(x.ndim, 1) for d in given)
    if len(set(found)) < len(found):
        raise UsageError(f"{operation}: dimensions {list(given)} name one twice")
    return [d for d in found if d < x.ndim] or list(range(x.ndim))


def _reduced(layout: Layout, dims: Sequence[int], keepdim: bool, cut: Placement) -> Layout:
    """Return the layout of the result, with placement `cut` along axes that cut a reduced dimension."""
    left = [d for d in range(len(layout.shape)) if d not in dims]
    shape = [1 if d in dims else n for d, n in enumerate(layout.shape) if keepdim or d not in dims]
    placements: list[Placement] = []
    for p in layout.placements:
        if isinstance(p, Shard) and p.dim in dims:
            placements.append(cut)
        elif isinstance(p, Shard):
            placements.append(Shard(p.dim if keepdim else left.index(p.dim), p.sizes))
        else:
            placements.append(p)
    return Layout.of(layout.grid, shape, placements)


def _local_sum(x: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    if not dims:
        return x.clone()
    if not _is_tall(x, dims):
        return x.sum(list(dims), keepdim, dtype=dtype)
    return _sum_of_rows(x.flatten(0, len(dims) - 1).flatten(1)).view(
        (*[1] * len(dims) * keepdim, *x.shape[len(dims) :])
    )


def _is_tall(x: Tensor, dims: Sequence[int]) -> bool:
    """Return True for the sum of many long rows that lie one behind another, without a gradient."""
    leading = list(dims) == list(range(len(dims))) and len(dims) < x.ndim
    plain = x.device.type == "cpu" and x.is_contiguous() and not (torch.is_grad_enabled() and x.requires_grad)
    long = leading and x.shape[: len(dims)].numel() >= 2 * ROWS and x.shape[len(dims) :].numel() >= ROWS
    return plain and long and not torch.is_autocast_enabled("cpu") and _multiplies_exactly(x.dtype)


def _multiplies_exactly(dtype: torch.dtype) -> bool:
    """Return True if torch multiplies numbers of this type without rounding them to fewer digits first."""
    if dtype == torch.float32:
        with suppress(RuntimeError):  # raised where a program has set the precision of one backend apart
            return torch.get_float32_matmul_precision() == "highest"
    return dtype == torch.float64


def _sum_of_rows(x_NM: Tensor) -> Tensor:
    """Return the sum over N, by products with ones, which read the rows in the order of memory.

    torch adds up the sums of ROWS rows each in pairs, so rounding grows little with N.
    """
    N, M = x_NM.shape
    rest = N % ROWS
    blocks = x_NM[: N - rest].view(-1, ROWS, M)
    ones = x_NM.new_ones(1, ROWS)
    sums = torch.bmm(ones.expand(len(blocks), 1, ROWS), blocks).sum(0)
    return (sums + ones[:, :rest] @ x_NM[N - rest :])[0]


@method
def sum(x: DistributedTensor, dim: Dims = None, keepdim: bool = False) -> DistributedTensor:
    """Return the sum along dimensions, of all numbers by default. Differentiable; sends nothing.

    Partial() along axes of ranks that cut a reduced dimension. bool and integers are summed as int64.
    """
    dims = _dims(x, dim, "sum")
    with x.grid.operation(f"sum({describe(x)}, {dim}, {keepdim})"):
        return DistributedTensor(
            _local_sum(x.local, dims, keepdim), _reduced(x.layout, dims, keepdim, Partial())
        )


@method
def mean(x: DistributedTensor, dim: Dims = None, keepdim: bool = False) -> DistributedTensor:
    """Return the mean along dimensions, of all numbers by default. Differentiable; sends nothing. Lies as the sum does.

    Pieces count by their lengths. Raises UsageError for integers.
    """
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise UsageError(
            f"mean of {x.dtype}: give floating-point or complex numbers, such as x.to(torch.float32)"
        )
    dims = _dims(x, dim, "mean")
    count = math.prod(x.shape[d] for d in dims)
    with x.grid.operation(f"mean({describe(x)}, {dim}, {keepdim})"):
        wide = torch.float32 if x.dtype in HALF else None  # a sum of 16 bits may be beyond their range
        found = _local_sum(x.local, dims, keepdim, wide) / (count if count else math.nan)
        return DistributedTensor(found.to(x.dtype), _reduced(x.layout, dims, keepdim, Partial()))


def _extreme(
    name: str,
    local: Callable[..., Tensor],
    op: str,
    x: DistributedTensor,
    dim: Dims,
    keepdim: bool,
    nan_shares: bool = False,
) -> DistributedTensor:
    """Return the extremes that `local` finds. nan_shares: where the result is NaN, the NaNs share its gradient.

    Without it all numbers get NaN there, as from torch.amax.
    """
    dims = _dims(x, dim, name)
    if x.dtype.is_complex:
        raise UsageError(f"{name} of {x.dtype}: complex numbers have no order")
    if any(x.shape[d] == 0 for d in dims):
        raise UsageError(f"{name} along a dimension of length 0 of {list(x.shape)}")
    with x.grid.operation(f"{name}({describe(x)}, {dim}, {keepdim})"):
        x = to_layout(x, settled(x.layout))
        target = _reduced(x.layout, dims, keepdim, Replicate())
        groups = [
            g
            for g, p in zip(x.grid.groups, x.placements, strict=True)
            if isinstance(p, Shard) and p.dim in dims and g.size > 1
        ]
        if not groups or not dims:
            return DistributedTensor(
                local(x.local, dims, keepdim=keepdim) if dims else x.local.clone(), target
            )
        with torch.no_grad():
            best = _over_ranks(_piece_extreme(x.local, local, dims, op), groups, x, op)
        shaped = best if keepdim else best.view(target.local_shape)
        if not (torch.is_grad_enabled() and x.local.requires_grad):
            return DistributedTensor(shaped, target)
        # torch.amax and amin divide the gradient evenly among equal numbers, which may lie on several ranks
        equal = x.local == best
        if nan_shares:
            equal |= x.local.isnan() & best.isnan()
        chosen = equal.to(x.dtype)
        count = _local_sum(chosen, dims, True)
        for group in groups:
            comm.all_reduce(count, group)
        weights = chosen / count

        def adjoint(dy: Tensor) -> Tensor:
            return dy.reshape(best.shape) * weights

        found = linear_map(x.local, lambda _: shaped, adjoint)
        return DistributedTensor(found, target)


def _piece_extreme(x: Tensor, local: Callable[..., Tensor], dims: Sequence[int], op: str) -> Tensor:
    """Return the extreme of this rank's piece, dimensions kept; of an empty piece what loses against any number."""
    if all(x.shape[d] for d in dims):
        return local(x, dims, keepdim=True)
    least = -math.inf if op == "max" else math.inf
    if not x.dtype.is_floating_point:
        info = torch.iinfo(torch.uint8 if x.dtype == torch.bool else x.dtype)
        least = (info.min if op == "max" else info.max) if x.dtype != torch.bool else float(op == "min")
    return x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], least)


def _over_ranks(best: Tensor, groups: Sequence[comm.Group], x: DistributedTensor, op: str) -> Tensor:
    """Return the extreme over the groups' ranks; NaN if a rank has one, which MPI's maximum does not promise."""
    x.grid.meet()
    total = (
        best.to(torch.uint8)
        if best.dtype == torch.bool
        else best.clone(memory_format=torch.contiguous_format)
    )
    nan = total.isnan().to(torch.uint8) if total.dtype.is_floating_point else None
    if nan is not None:
        total = total.nan_to_num(
            nan=-math.inf if op == "max" else math.inf, posinf=math.inf, neginf=-math.inf
        )
    for group in groups:
        comm.all_reduce(total, group, op)
        if nan is not None:
            comm.all_reduce(nan, group, "max")
    if nan is not None:
        total = total.masked_fill(nan.bool(), math.nan)
    return total.to(best.dtype)


@method
def max(x: DistributedTensor, dim: Dims = None, keepdim: bool = False) -> DistributedTensor:
    """Return the largest numbers along dimensions, of all by default: torch.amax. Differentiable.

    Replicated along axes of ranks that cut a reduced dimension: an all-reduce of the result's size, and one byte a
    number for NaN. Equal numbers share the gradient. Raises UsageError for complex numbers and for a length of 0.
    """
    return _extreme("max", torch.amax, "max", x, dim, keepdim)


@method
def min(x: DistributedTensor, dim: Dims = None, keepdim: bool = False) -> DistributedTensor:
    """Return the smallest numbers along dimensions, of all by default: torch.amin. Otherwise like `max`."""
    return _extreme("min", torch.amin, "min", x, dim, keepdim)


@method
def argmax(x: DistributedTensor, dim: int | None = None, keepdim: bool = False) -> DistributedTensor:
    """Return the place of the largest number along one dimension; None: in the tensor laid out flat. int64.

    The first of equal numbers, and the first NaN where there is one. Replicated along axes of ranks that cut the
    dimension: sends one number of the result's size and its place to each of the others.
    """
    dims = _dims(x, dim, "argmax")
    if x.dtype.is_complex or x.dtype == torch.bool:
        raise UsageError(f"argmax of {x.dtype}: give numbers that have an order")
    if any(x.shape[d] == 0 for d in dims):
        raise UsageError(f"argmax along a dimension of length 0 of {list(x.shape)}")
    with x.grid.operation(f"argmax({describe(x)}, {dim}, {keepdim})"), torch.no_grad():
        x = to_layout(x, settled(x.layout))
        target = _reduced(x.layout, dims, keepdim, Replicate())
        place, best = _first_largest(x, dims)
        for group, p in zip(x.grid.groups, x.placements, strict=True):
            if isinstance(p, Shard) and p.dim in dims and group.size > 1:
                x.grid.meet()
                places = comm.all_gather(place[None].contiguous(), group)
                values = comm.all_gather(best[None].contiguous(), group)
                place, best = _better(places, values)
        return DistributedTensor(place.view(target.local_shape), target)


def _first_largest(x: DistributedTensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the place in the whole tensor, and the value, of the first largest number of this rank's piece."""
    order = [*(d for d in range(x.ndim) if d not in dims), *dims]
    kept = [x.local.shape[d] for d in order[: x.ndim - len(dims)]]
    along = [x.local.shape[d] for d in dims]
    if not all(along):
        lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
        return x.local.new_full(kept, torch.iinfo(torch.int64).max, dtype=torch.int64), x.local.new_full(
            kept, lowest
        )
    flat = x.local.permute(order).reshape(*kept, math.prod(along))
    at = flat.argmax(-1)
    value = flat.gather(-1, at[..., None])[..., 0]
    place, rest = torch.zeros_like(at), at
    stride = 1
    for d in reversed(dims):
        place = place + (rest % x.local.shape[d] + x.layout.mine[d][0]) * stride
        rest, stride = rest // x.local.shape[d], stride * x.shape[d]
    return place, value


def _better(places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place and value of the largest along dimension 0; NaN before all, the first place among equals."""
    place, best = places[0], values[0]
    for p, v in zip(places[1:], values[1:], strict=True):
        if v.dtype.is_floating_point:
            wins = (v > best) | (v.isnan() & ~best.isnan())
            even = (v == best) | (v.isnan() & best.isnan())
        else:
            wins, even = v > best, v == best
        taken = wins | (even & (p < place))
        place, best = torch.where(taken, p, place), torch.where(taken, v, best)
    return place, best


@method
def norm(x: DistributedTensor, p: float = 2.0, dim: Dims = None, keepdim: bool = False) -> DistributedTensor:
    """Return the vector norm of order p along dimensions: torch.linalg.vector_norm. Differentiable.

    p: 0 counts the numbers that are not zero; inf and -inf take the largest and the smallest magnitude. Where an
    axis of ranks cuts a dimension that is reduced, it sends two all-reduces of the result's size and the result is
    replicated along the axis; for p = 0 the counts are terms, which are summed and split.
    """
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise UsageError(f"norm of {x.dtype}: give floating-point or complex numbers")
    if not isinstance(p, (int, float)) or (p < 0 and not math.isinf(p)) or p != p:
        raise UsageError(f"norm of order {p!r}: give 0, a positive number, inf or -inf")
    dims = _dims(x, dim, "norm")
    with x.grid.operation(f"norm({describe(x)}, {p}, {dim}, {keepdim})"):
        x = to_layout(x, settled(x.layout))
        if math.isinf(p):
            magnitudes = DistributedTensor(x.local.abs(), x.layout)

            def extreme(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
                found: Tensor = torch.linalg.vector_norm(x, p, dims, keepdim)
                return found

            op = "max" if p > 0 else "min"
            return _extreme("norm", extreme, op, magnitudes, dims, keepdim, nan_shares=True)
        target = _reduced(x.layout, dims, keepdim, Partial())
        local = (
            x.local if dims else x.local.reshape(1)
        )  # vector_norm refuses some numbers without a dimension
        mine = torch.linalg.vector_norm(local, p, dims or 0, keepdim and bool(dims))
        if not target.partial:
            return DistributedTensor(mine, target)
        # the norm of the ranks' norms, so that no power overflows
        groups = [g for g, q in zip(x.grid.groups, target.placements, strict=True) if isinstance(q, Partial)]
        if p == 0:
            return to_layout(DistributedTensor(mine, target), settled(target))
        return DistributedTensor(
            _norm_of_norms(mine, p, groups, x), _reduced(x.layout, dims, keepdim, Replicate())
        )


def _norm_of_norms(mine: Tensor, p: float, groups: Sequence[comm.Group], x: DistributedTensor) -> Tensor:
    """Return the norm over ranks of each rank's norm; the gradient of a rank's norm is (mine / total)^(p - 1).

    Where another rank has NaN, a rank of zeros alone gets the gradient 0 for p > 2, which torch has as NaN.
    """
    x.grid.meet()
    with torch.no_grad():
        scale = mine.clone(memory_format=torch.contiguous_format)
        for group in groups:
            comm.all_reduce(scale, group, "max" if p > 0 else "min")
        usable = (scale > 0) & scale.isfinite()
        safe = torch.where(usable, scale, torch.ones_like(scale))
        powers = (mine / safe) ** p
        for group in groups:
            comm.all_reduce(powers, group)
        total = safe * powers ** (1 / p)
        ratio = torch.where(mine == total, 1, mine / total)  # also of 0 and of inf
        slope = (ratio ** (p - 1)).masked_fill((mine == 0) & total.isfinite(), 0)  # p < 1 has no slope at 0
    return linear_map(mine, lambda _: total, lambda dy: dy * slope)
