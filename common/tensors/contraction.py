"""Contractions of several tensors: `einsum` and `tensordot`, pair by pair along the path that opt_einsum finds.

    c = einsum("ij,jk,kl->il", a, b, c)
    f = expression("ij,jk,kl->il", (9, 8), (8, 7), (7, 6))      # the path is found once
    c = f(a, b, c)

Each pair is one batched matrix product (`pairwise`), which each axis of ranks splits along the dimension that costs
least: a batch dimension, one of the left or right operand, or an inner one, whose terms are then summed and split.
Small products are computed on every rank. Intermediate tensors stay split. With a limit of memory the largest ones are
made in slices: some dimensions are fixed, all their values are gone through, and the results are added or joined.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import opt_einsum
import torch
from opt_einsum.parser import get_symbol, parse_einsum_input

from common.errors import UsageError
from common.launch.terminal import make_table, terminal
from common.tensors import reductions
from common.tensors.cost import choose
from common.tensors.layout import Layout, Placement, Replicate, Shard, integer, together
from common.tensors.pairwise import Pair
from common.tensors.tensor import DistributedTensor, common_grid, describe, dimension, settled, to_layout

Optimize = Literal["auto", "optimal", "dp", "greedy"] | bool | Sequence[tuple[int, ...]]
STRATEGIES = ("optimal", "dp", "greedy", "auto")
Labelled = tuple[DistributedTensor, str]


def einsum(
    equation: str, *operands: DistributedTensor, optimize: Optimize = "auto", memory: float | None = None
) -> DistributedTensor:
    """Return the contraction that `equation` describes, as torch.einsum does; the result stays split. Differentiable.

    optimize: how opt_einsum finds the order of pairs: auto, optimal, dp, greedy; False takes them from left to right; a
    list of tuples is the path itself. memory: bytes that an intermediate tensor may have on a rank; default: those of
    `grid.rates`. Sends what each product lacks. Raises UsageError for an equation that does not fit the shapes.
    """
    if not isinstance(equation, str):
        raise UsageError('einsum: give the equation first, as in einsum("ij,jk->ik", a, b)')
    common_grid(operands, "einsum")
    return expression(equation, *(tuple(x.shape) for x in operands), optimize=optimize, memory=memory)(
        *operands
    )


def tensordot(
    a: DistributedTensor, b: DistributedTensor, dims: int | tuple[Sequence[int], Sequence[int]] = 2
) -> DistributedTensor:
    """Return the sum over the last `dims` dimensions of a and the first of b, or over two lists. Differentiable."""
    common_grid([a, b], "tensordot")
    if not np.iterable(dims):
        dims = integer(dims, "tensordot: dimensions")
        if not 0 <= dims <= min(a.ndim, b.ndim):
            raise UsageError(f"tensordot over {dims} dimensions of {list(a.shape)} and {list(b.shape)}")
        left, right = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    else:
        left, right = (
            [dimension(d, x.ndim, "tensordot") for d in of] for x, of in zip((a, b), dims, strict=True)
        )
    if len(left) != len(right) or [a.shape[d] for d in left] != [b.shape[d] for d in right]:
        raise UsageError(
            f"tensordot: dimensions {left} of {list(a.shape)} and {right} of {list(b.shape)} differ"
        )
    of_a = [get_symbol(i) for i in range(a.ndim)]
    of_b = [get_symbol(a.ndim + i) for i in range(b.ndim)]
    for i, j in zip(left, right, strict=True):
        of_b[j] = of_a[i]
    kept = [x for i, x in enumerate(of_a) if i not in left] + [
        x for j, x in enumerate(of_b) if j not in right
    ]
    return einsum(f"{''.join(of_a)},{''.join(of_b)}->{''.join(kept)}", a, b)


def expression(
    equation: str, *shapes: Sequence[int], optimize: Optimize = "auto", memory: float | None = None
) -> Callable[..., DistributedTensor]:
    """Return a function of tensors of these shapes that contracts them; the path is found once. See `einsum`."""
    return Contraction(equation, shapes, optimize, memory)


class Contraction:
    """A contraction with its path. Raises UsageError for an equation that does not fit the shapes."""

    def __init__(
        self,
        equation: str,
        shapes: Sequence[Sequence[int]],
        optimize: Optimize = "auto",
        memory: float | None = None,
    ) -> None:
        self.equation, self.shapes, self.memory = equation, [tuple(s) for s in shapes], memory
        try:
            given, self.output, _ = parse_einsum_input((equation, *self.shapes), shapes=True)
            self.inputs = given.split(",")
            self.lengths = _lengths(self.inputs, self.shapes)
            self.path = self._path(optimize)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            shown = ", ".join(str(list(s)) for s in self.shapes)
            raise UsageError(f"einsum {equation!r} of {shown}: {error}") from None

    def _path(self, optimize: Optimize) -> list[tuple[int, ...]]:
        if optimize is False:
            return [(0, 1) if i == 0 else (0, len(self.shapes) - 1 - i) for i in range(len(self.shapes) - 1)]
        how: Any = "auto" if optimize is True else optimize
        if isinstance(how, str) and how not in STRATEGIES:
            raise ValueError(f"optimize={how!r}; choose one of {', '.join(STRATEGIES)}")
        if len(self.shapes) < 2:
            return []
        path, _ = opt_einsum.contract_path(self.equation, *self.shapes, shapes=True, optimize=how)
        return [tuple(step) for step in path]

    def steps(self) -> list[tuple[tuple[int, ...], str]]:
        """Return the operands of each step, by their places in the list, and the labels of its result."""
        left, found = list(self.inputs), []
        for step in self.path:
            places = tuple(sorted(step, reverse=True))
            taken = [left.pop(i) for i in places]
            needed = set(self.output).union(*left)
            result = "".join(dict.fromkeys(x for labels in reversed(taken) for x in labels if x in needed))
            left.append(result)
            found.append((places, result))
        return found

    def sliced(self, limit: float, item: int, ranks: int) -> list[str]:
        """Return the labels to fix so that no intermediate tensor exceeds `limit` bytes on a rank."""
        lengths, chosen = dict(self.lengths), list[str]()

        def largest() -> str:
            results = [labels for _, labels in self.steps()[:-1]] or [""]
            return max(results, key=lambda labels: math.prod(lengths[x] for x in labels))

        while math.prod(lengths[x] for x in largest()) * item / ranks > limit:
            free = [x for x in largest() if lengths[x] > 1]
            if not free:
                raise UsageError(f"einsum {self.equation!r}: no slice fits into {limit:,.0f} bytes on a rank")
            label = max([x for x in free if x not in self.output] or free, key=lambda x: lengths[x])
            chosen.append(label)
            lengths[label] = 1
        return chosen

    def __call__(self, *operands: DistributedTensor) -> DistributedTensor:
        """Return the contraction of tensors of the shapes that the path was found for."""
        if [tuple(x.shape) for x in operands] != self.shapes:
            raise UsageError(
                f"einsum {self.equation!r}: {describe(*operands)}, but the path is for {self.shapes}"
            )
        grid = common_grid(operands, "einsum")
        with grid.operation(f"einsum({self.equation}, {describe(*operands)}, {self.path})"):
            dtype = operands[0].dtype
            for x in operands[1:]:
                dtype = torch.promote_types(dtype, x.dtype)
            limit = grid.rates.memory if self.memory is None else self.memory
            fixed = self.sliced(limit, dtype.itemsize, grid.world.size) if math.isfinite(limit) else []
            pairs = [_diagonal(x, of) for x, of in zip(operands, self.inputs, strict=True)]
            if not fixed:
                return self.contracted(pairs)
            return self._in_slices([(_whole_along(x, of, fixed), of) for x, of in pairs], fixed)

    def _in_slices(self, operands: Sequence[Labelled], fixed: Sequence[str]) -> DistributedTensor:
        """Return the sum over the values of fixed inner labels, and the values of fixed outer ones joined."""
        label, *rest = fixed
        parts = []
        for i in range(self.lengths[label]):
            some = [_selected(x, of, label, i) for x, of in operands]
            smaller = copy.copy(self)
            smaller.inputs, smaller.output = [of for _, of in some], self.output.replace(label, "")
            parts.append(smaller._in_slices(some, rest) if rest else smaller.contracted(some))
        if label not in self.output:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total
        return _joined(parts, self.output.index(label))

    def contracted(self, operands: Sequence[Labelled]) -> DistributedTensor:
        """Return the contraction of operands along the path."""
        left = list(operands)
        for places, result in self.steps():
            taken = [left.pop(i) for i in places]
            needed = set(self.output).union(*(of for _, of in left))
            made = taken.pop()
            while taken:
                more = taken.pop()
                later = needed.union(*(of for _, of in taken))
                made = _pair(made, more, later)
            left.append(_ordered(_summed(made, set(result)), result))
        [last] = left
        return _ordered(_summed(last, set(self.output)), self.output)[0]


def print_path_info(equation: str, *shapes: Sequence[int]) -> None:
    """Print the path that opt_einsum finds: its pairs, FLOPs and largest intermediate tensor."""
    print(opt_einsum.contract_path(equation, *shapes, shapes=True)[1])


def compare_optimization_strategies(equation: str, *shapes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Print and return for each strategy: FLOPs of its path, its largest intermediate, seconds to find it."""
    found: dict[str, dict[str, float]] = {}
    for strategy in STRATEGIES:
        start = time.perf_counter()
        _, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize=cast(Any, strategy))
        found[strategy] = {
            "flops": float(info.opt_cost),
            "largest": float(info.largest_intermediate),
            "seconds": time.perf_counter() - start,
        }
    rows = [
        (s, f"{v['flops']:,.0f}", f"{v['largest']:,.0f}", f"{v['seconds']:.4f}") for s, v in found.items()
    ]
    terminal().print(make_table(equation, ("strategy", ">FLOPs", ">largest", ">seconds to find"), rows))
    return found


def _lengths(inputs: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for labels, shape in zip(inputs, shapes, strict=True):
        if len(labels) != len(shape):
            raise ValueError(f"{labels!r} has {len(labels)} dimensions, the tensor {len(shape)}")
        for label, n in zip(labels, shape, strict=True):
            if lengths.setdefault(label, n) != n:
                raise ValueError(f"dimension {label!r} has lengths {lengths[label]} and {n}")
    return lengths


def _pair(one: Labelled, other: Labelled, needed: set[str]) -> Labelled:
    """Return the product of two operands, summed over what nobody needs later."""
    one, other = _summed(one, needed | set(other[1])), _summed(other, needed | set(one[1]))
    (a, of_a), (b, of_b) = one, other
    result = "".join(dict.fromkeys(x for x in of_a + of_b if x in needed))
    pair = Pair(a, b, (of_a, of_b, result))
    return choose(a.grid, "einsum", pair.ways(whole=True), key=pair.key).run(), result


def _summed(x: Labelled, needed: set[str]) -> Labelled:
    """Return x summed over the dimensions that nobody needs."""
    tensor, labels = x
    gone = [d for d, label in enumerate(labels) if label not in needed]
    if not gone:
        return x
    total = reductions.sum(tensor, gone)
    return to_layout(total, settled(total.layout)), "".join(label for label in labels if label in needed)


def _ordered(x: Labelled, labels: str) -> Labelled:
    tensor, found = x
    return (tensor if found == labels else tensor.permute(*(found.index(label) for label in labels))), labels


def _diagonal(x: DistributedTensor, labels: str) -> Labelled:
    """Return x with one dimension for each label: the diagonal of those that have the same one, made whole first."""
    for label in labels:
        if labels.count(label) > 1:
            i, j = labels.index(label), labels.rindex(label)
            x = _whole_along(x, labels, [label])
            left = labels[:i] + labels[i + 1 : j] + labels[j + 1 :] + label
            shape = [n for d, n in enumerate(x.shape) if d not in (i, j)] + [x.shape[i]]
            moved = [d - (d > i) - (d > j) for d in range(x.ndim)]
            placements = [Shard(moved[p.dim], p.sizes) if isinstance(p, Shard) else p for p in x.placements]
            piece = x.local.diagonal(dim1=i, dim2=j)
            return _diagonal(DistributedTensor(piece, Layout.of(x.grid, shape, placements)), left)
    return x, labels


def _whole_along(x: DistributedTensor, labels: str, fixed: Sequence[str]) -> DistributedTensor:
    """Return x with no axis of ranks splitting a dimension with one of these labels; other dimensions are split."""
    layout = settled(x.layout)
    taken = {p.dim for p in layout.placements if isinstance(p, Shard)}
    placements: list[Placement] = []
    for p in layout.placements:
        if isinstance(p, Shard) and labels[p.dim] in fixed:
            free = [d for d in range(x.ndim) if labels[d] not in fixed and d not in taken]
            best = max(free, key=lambda d: x.shape[d], default=None)
            placements.append(Replicate() if best is None else Shard(best))
            taken |= set() if best is None else {best}
        else:
            placements.append(p)
    return to_layout(x, layout.placed(*together(placements)))


def _selected(x: DistributedTensor, labels: str, label: str, i: int) -> Labelled:
    """Return x at place i of a whole dimension."""
    if label not in labels:
        return x, labels
    dim = labels.index(label)
    shape = [n for d, n in enumerate(x.shape) if d != dim]
    placements = [Shard(p.dim - (p.dim > dim), p.sizes) if isinstance(p, Shard) else p for p in x.placements]
    return DistributedTensor(x.local.select(dim, i), Layout.of(x.grid, shape, placements)), labels.replace(
        label, ""
    )


def _joined(parts: Sequence[DistributedTensor], dim: int) -> DistributedTensor:
    """Return tensors stacked along a new dimension, which no axis of ranks splits."""
    first = parts[0].layout
    pieces = [to_layout(part, first).local for part in parts]
    shape = [*first.shape[:dim], len(parts), *first.shape[dim:]]
    placements = [
        Shard(p.dim + (p.dim >= dim), p.sizes) if isinstance(p, Shard) else p for p in first.placements
    ]
    return DistributedTensor(torch.stack(pieces, dim), Layout.of(first.grid, shape, placements))
