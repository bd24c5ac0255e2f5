"""Fourier transforms along split and unsplit dimensions, with the names and meanings of torch.fft.

    y = fft2(x)                          # x split by rows: rows, one exchange, columns, and the exchange back
    y = fft2(x, order="transposed")      # the result stays split by columns: half the bytes

A dimension is transformed where it is whole. Each rank transforms the dimensions that are whole in its piece; then one
exchange splits the tensor along another dimension (a slab on one axis of ranks, a pencil on two), and so on. A tensor
with one dimension can take the six steps of `six_step`, and a matrix without a gradient the transposing exchanges of
`slab`. The kernels are those of torch.fft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from common.errors import UsageError
from common.tensors.cost import Cost, Way, choose, moving, received
from common.tensors.layout import Layout, Placement, Replicate, Shard, integers, size_of, together
from common.tensors.rates import Term
from common.tensors.six_step import factors, six_step_cost, six_steps
from common.tensors.slab import fits, height_of, layouts, slab
from common.tensors.tensor import DistributedTensor, common_grid, describe, settled, to_layout
from common.tensors.transfer import bytes_sent

Norm = Literal["backward", "ortho", "forward"]
Order = Literal["natural", "transposed"]
KERNELS: dict[str, Callable[..., Tensor]] = {
    "fft": torch.fft.fft,
    "ifft": torch.fft.ifft,
    "rfft": torch.fft.rfft,
    "irfft": torch.fft.irfft,
}


def fft(
    x: DistributedTensor,
    n: int | None = None,
    dim: int = -1,
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the Fourier transform along one dimension. n: trim or pad with zeros to this length. Differentiable.

    Sends nothing along a dimension that no axis of ranks splits. Otherwise the numbers change their place twice, or
    once with order="transposed", which leaves the result split along another dimension.
    """
    return _transform("fft", x, None if n is None else (n,), (dim,), norm, order, way)


def ifft(
    x: DistributedTensor,
    n: int | None = None,
    dim: int = -1,
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the inverse transform along one dimension; see `fft`."""
    return _transform("ifft", x, None if n is None else (n,), (dim,), norm, order, way)


def rfft(
    x: DistributedTensor,
    n: int | None = None,
    dim: int = -1,
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the n // 2 + 1 numbers that determine the transform of real numbers; see `fft`."""
    return _transform("rfft", x, None if n is None else (n,), (dim,), norm, order, way)


def irfft(
    x: DistributedTensor,
    n: int | None = None,
    dim: int = -1,
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the n real numbers that `rfft` transforms to x; n is even by default."""
    return _transform("irfft", x, None if n is None else (n,), (dim,), norm, order, way)


def fft2(
    x: DistributedTensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] = (-2, -1),
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the transform along two dimensions; s: their lengths after trimming or padding, -1 for their own.

    See `fft`.
    """
    return _transform("fft2", x, s, dim, norm, order, way)


def ifft2(
    x: DistributedTensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] = (-2, -1),
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the inverse transform along two dimensions; see `fft`."""
    return _transform("ifft2", x, s, dim, norm, order, way)


def fftn(
    x: DistributedTensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] | None = None,
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the transform along several dimensions, all by default; see `fft`."""
    return _transform("fftn", x, s, dim, norm, order, way)


def ifftn(
    x: DistributedTensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] | None = None,
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the inverse transform along several dimensions; see `fft`."""
    return _transform("ifftn", x, s, dim, norm, order, way)


def rfft2(
    x: DistributedTensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] = (-2, -1),
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the transform of real numbers along two dimensions, the last one halved; see `rfft`."""
    return _transform("rfft2", x, s, dim, norm, order, way)


def rfftn(
    x: DistributedTensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] | None = None,
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the transform of real numbers along several dimensions, the last one halved; see `rfft`."""
    return _transform("rfftn", x, s, dim, norm, order, way)


def irfft2(
    x: DistributedTensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] = (-2, -1),
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the real numbers that `rfft2` transforms to x; the last length is even by default; see `fft`."""
    return _transform("irfft2", x, s, dim, norm, order, way)


def irfftn(
    x: DistributedTensor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] | None = None,
    norm: Norm = "backward",
    order: Order = "natural",
    way: str | None = None,
) -> DistributedTensor:
    """Return the real numbers that `rfftn` transforms to x; see `irfft`."""
    return _transform("irfftn", x, s, dim, norm, order, way)


@dataclass(frozen=True)
class Step:
    """Transform one whole dimension to length n by a kernel, or move to a layout."""

    layout: Layout
    """How the tensor lies after the step."""
    kernel: str = ""
    dim: int = 0
    n: int = 0


def _transform(
    name: str,
    x: DistributedTensor,
    s: Sequence[int] | None,
    dim: Sequence[int] | None,
    norm: Norm,
    order: Order,
    way: str | None,
) -> DistributedTensor:
    grid = common_grid([x], name)
    with grid.operation(f"{name}({describe(x)}, {s}, {dim}, {norm}, {order}, {way})"):
        if not (x.dtype.is_floating_point or x.dtype.is_complex):
            x = x.to(torch.get_default_dtype())  # as torch.fft does
        key = (x.layout, x.dtype, str(s), str(dim), norm, order)
        return choose(grid, name, _ways(name, x, s, dim, norm, order), way, key).run()


def _ways(
    name: str,
    x: DistributedTensor,
    s: Sequence[int] | None,
    dim: Sequence[int] | None,
    norm: Norm,
    order: Order,
) -> list[Way]:
    """Return the ways of a transform: through each dimension that can be split meanwhile, and on every rank."""
    dims, lengths = _checked(name, x, s, dim, norm, order)
    kind, start = name.rstrip("2n"), settled(x.layout)
    ways, seen = [], set[tuple[Step, ...]]()
    throughs: list[int | None] = [*range(x.ndim)]
    if order == "natural" or x.ndim == 1:
        throughs = [None, *throughs]  # gathered, the result would lie as x does, not transposed
    for through in throughs:
        steps = tuple(_steps(kind, start, dims, lengths, order, through))
        if steps not in seen:
            seen.add(steps)
            moves = any(not step.kernel for step in steps)
            called = (
                "in place"
                if not moves
                else "on every rank"
                if through is None
                else f"through dimension {through}"
            )
            ways.append(_way(called, x, start, steps, norm))
    last = kind != "rfft" or dims[-1:] == [1]
    if sorted(dims) == [0, 1] and last and lengths == [x.shape[d] for d in dims] and fits(x, kind):
        ways.append(_transposing(x, kind, norm, order))
    whole = len(start.grid.shape) == 1 and x.ndim == 1 and start.cut_along(0) and lengths[0] == x.shape[0]
    if whole and kind in ("fft", "ifft") and order == "natural" and (pair := factors(lengths[0])):
        ways.append(
            Way("six steps", partial(six_steps, x, pair, kind, norm), partial(six_step_cost, x, pair))
        )
    return ways


def _transposing(x: DistributedTensor, kind: str, norm: Norm, order: Order) -> Way:
    def cost() -> Cost:
        wide, n = x.dtype.to_complex(), x.grid.world.size
        rows, columns = layouts(x, kind)
        terms, held, memory, sent = list[Term](), 0, 0, Fraction(0)
        moves = (rows, columns, x.dtype), (columns, rows, wide)
        for dim, (before, after, dtype) in enumerate(moves):
            lines, length = max(box[dim][1] - box[dim][0] for box in before.boxes), x.shape[1 - dim]
            height = height_of(length, dtype.itemsize)
            terms.append(Term("transform", (lines, length, 1), wide, banded=True))
            copy, made = length * dtype.itemsize, before.shape[1 - dim] * wide.itemsize
            band = min(lines, height) * (copy + made)
            if dim == 0 or order == "natural":
                held += received(before, after, wide)
                bands = -(-lines // height)
                most = max(int(bytes_sent(before, after, wide.itemsize, r)) for r in range(n))
                terms.append(Term("exchange", (most // bands, n - 1), times=bands))
                sent += bytes_sent(before, after, wide.itemsize)
            memory = max(memory, held + band)
        return Cost(tuple(terms), memory, sent)

    return Way("transposing", lambda: slab(x, kind, norm, order), cost)


def _checked(
    name: str, x: DistributedTensor, s: Sequence[int] | None, dim: Sequence[int] | None, norm: str, order: str
) -> tuple[list[int], list[int]]:
    """Return the dimensions and their lengths after the transform's trimming. Raises UsageError."""
    if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16, torch.complex32):
        wide = torch.complex64 if x.dtype.is_complex else torch.float32
        raise UsageError(f"{name} of {x.dtype}: torch has none on CPUs; convert it with x.to({wide})")
    if norm not in ("backward", "ortho", "forward"):
        raise UsageError(f"{name}: norm={norm!r}; choose one of backward, ortho, forward")
    if order not in ("natural", "transposed"):
        raise UsageError(f"{name}: order={order!r}; choose one of natural, transposed")
    if x.dtype.is_complex and name.startswith("rfft"):
        raise UsageError(f"{name} of {x.dtype}: give real numbers, or call {name[1:]}")
    s = None if s is None else integers(s, f"{name}: lengths")
    if dim is None:
        given = [*range(x.ndim - len(s), x.ndim)] if s else [*range(x.ndim)]
    else:
        given = integers(dim, f"{name}: dimensions")
    if not given or any(not -x.ndim <= d < x.ndim for d in given):
        raise UsageError(f"{name}: dimensions {given} of a tensor with {x.ndim}")
    dims = [d % x.ndim for d in given]
    if len(set(dims)) < len(dims) or (s is not None and len(s) != len(dims)):
        raise UsageError(
            f"{name}: dimensions {given} and lengths {s}: give each dimension once, with one length"
        )
    lengths = [x.shape[d] for d in dims]
    if name.startswith("irfft"):
        lengths[-1] = 2 * (x.shape[dims[-1]] - 1)
    if s is not None:
        lengths = [own if n == -1 else n for n, own in zip(s, lengths, strict=True)]
    if min(lengths) < 1 or min(x.shape[d] for d in dims) < 1:
        raise UsageError(f"{name}: lengths {lengths} of {list(x.shape)}: give at least 1")
    return dims, lengths


def _steps(
    kind: str, start: Layout, dims: Sequence[int], lengths: Sequence[int], order: Order, through: int | None
) -> list[Step]:
    """Return the steps: whole dimensions first, then a move that makes others whole, and so on.

    through: the dimension that is split meanwhile, if it can be; None gathers. Of real numbers the last dimension comes
    first, to real numbers it comes last; all others in any order.
    """
    left = dict(zip(dims, lengths, strict=True))
    at, steps = start, list[Step]()
    special = dims[-1]

    def ready() -> list[int]:
        if kind == "rfft" and special in left:
            return [special]
        found = [d for d in left if not (kind == "irfft" and d == special)]
        return found or list(left)

    while left:
        whole = [d for d in ready() if not at.cut_along(d)]
        if not whole:
            at = _moved_away(at, ready()[0], list(left), through)
            steps.append(Step(at))
            continue
        d = whole[0]
        n = left.pop(d)
        kernel = kind if d == special or kind in ("fft", "ifft") else {"rfft": "fft", "irfft": "ifft"}[kind]
        shape = list(at.shape)
        shape[d] = n // 2 + 1 if kernel == "rfft" else n
        at = Layout.of(at.grid, shape, at.placements)
        steps.append(Step(at, kernel, d, n))
    back = [
        Shard(p.dim, p.sizes if at.shape[p.dim] == start.shape[p.dim] else None)
        if isinstance(p, Shard)
        else p
        for p in start.placements
    ]
    end = at.placed(*together(back))
    gathered = any(
        isinstance(p, Replicate) and isinstance(q, Shard) for p, q in zip(at.placements, back, strict=True)
    )
    if end != at and (order == "natural" or gathered):
        steps.append(Step(end))
    return steps


def _moved_away(at: Layout, dim: int, left: Sequence[int], through: int | None) -> Layout:
    """Return the layout in which `dim` is whole and another dimension is split in its place.

    The dimension `through` if it is free; otherwise one that is not to be transformed any more, the longest.
    """
    placements: list[Placement] = list(at.placements)
    for axis in at.cut_along(dim):
        taken = {p.dim for p in placements if isinstance(p, Shard)}
        free = [d for d in range(len(at.shape)) if d != dim and d not in taken]
        if through is None or not free:
            placements[axis] = Replicate()
        else:
            best = max(free, key=lambda d: (d == through, d not in left, at.shape[d]))
            placements[axis] = Shard(best)
    return at.placed(*together(placements))


def _way(name: str, x: DistributedTensor, start: Layout, steps: Sequence[Step], norm: Norm) -> Way:
    complex_type = x.dtype.to_complex()

    def cost() -> Cost:
        at, kind = x.layout, x.dtype
        terms, held, memory, sent = list[Term](), 0, 0, Fraction(0)
        for step in (Step(start), *steps):
            if step.kernel:
                lengths = [hi - lo for lo, hi in max(step.layout.boxes, key=size_of)]
                apart = math.prod(lengths[step.dim + 1 :])
                terms.append(
                    Term("transform", (math.prod(lengths[: step.dim]) * apart, step.n, apart), complex_type)
                )
                read, length = step.n // 2 + 1 if step.kernel == "irfft" else step.n, at.shape[step.dim]
                padded = at.largest // length * read * kind.itemsize if read > length else 0
                kind = x.dtype.to_real() if step.kernel == "irfft" else complex_type
                made = step.layout.largest * kind.itemsize
            else:
                terms += moving(at, step.layout, kind)
                made, padded = received(at, step.layout, kind), 0
                sent += bytes_sent(at, step.layout, kind.itemsize)
            memory, held = max(memory, held + padded + made), made or held  # x itself is not counted
            at = step.layout
        return Cost(tuple(terms), memory, sent)

    def run() -> DistributedTensor:
        y = to_layout(x, start)
        for step in steps:
            y = _kernel(y, step, norm) if step.kernel else to_layout(y, step.layout)
        return y

    return Way(name, run, cost)


def _kernel(x: DistributedTensor, step: Step, norm: Norm) -> DistributedTensor:
    piece = x.local
    if not piece.numel():  # no rows here: the kernels refuse empty tensors
        kind = piece.dtype.to_real() if step.kernel == "irfft" else piece.dtype.to_complex()
        empty = piece.new_zeros(step.layout.local_shape, dtype=kind)
        return DistributedTensor(empty + piece.abs().sum(), step.layout)
    return DistributedTensor(KERNELS[step.kernel](piece, step.n, step.dim, norm), step.layout)
