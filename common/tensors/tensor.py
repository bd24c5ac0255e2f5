"""A tensor that is split over a grid of ranks: its global shape, its layout, and this rank's piece.

    x = normal((1000, 800), grid, Shard(0), seed=1)
    y = x @ x.T + 1                       # stays split
    y.redistribute(Replicate())           # explicit
    y.full()                              # a plain tensor on every rank, explicit

Operations are made of four parts, each with its adjoint: a change of layout, a local operation of torch, a sum of the
gradients of what ranks share, and terms whose sum is the result.

    gradient of Shard(d)      Shard(d)
    gradient of Replicate()   Replicate(): the whole gradient, the same on every rank
    gradient of Partial()     Replicate(): every term has the gradient of the sum

So the adjoint of `redistribute` from one layout to another is `redistribute` in the opposite direction between the
layouts of the gradients.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.comm.collectives import linear_map
from common.errors import UsageError
from common.tensors.grid import Grid, same_grid
from common.tensors.layout import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    integer,
    integers,
    show,
    together,
)
from common.tensors.transfer import moved

Number = int | float | complex
_methods: dict[str, Callable[..., DistributedTensor]] = {}
F = TypeVar("F", bound=Callable[..., Any])


def method(function: F) -> F:
    """Make an operation of another module a method of tensors: `sum`, and `matmul` for `@`."""
    _methods[function.__name__] = function
    return function


class DistributedTensor:
    """A tensor of a global shape, of which `local` is this rank's piece as `layout` says.

    Autograd works through `local`: `requires_grad_()`, `backward()` and `grad` are those of torch. Raises ValueError
    if the piece has not the shape of its box.
    """

    __array_ufunc__ = None  # so that numpy leaves its operators to this class, which refuses arrays

    def __init__(self, local: Tensor, layout: Layout) -> None:
        if tuple(local.shape) != layout.local_shape:
            raise ValueError(
                f"a piece of {list(local.shape)}, but {layout} has {list(layout.local_shape)} here"
            )
        if local.dtype == torch.bool and layout.partial:
            raise UsageError(f"{layout} of bool: terms are numbers; convert them, as in x.to(torch.int64)")
        self.local, self.layout = local, layout

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.layout.shape)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each axis of the grid."""
        return self.layout.placements

    @property
    def grid(self) -> Grid:
        """The ranks that hold the tensor."""
        return self.layout.grid

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Device of this rank's piece."""
        return self.local.device

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        box = ", ".join(f"{lo}:{hi}" for lo, hi in self.layout.mine)
        term = "a term of " if self.layout.partial else ""
        here = f"rank {self.grid.world.rank} of {self.grid.world.size} holds {term}[{box}]"
        return f"DistributedTensor({list(self.shape)}, {kind}, {show(self.placements)}; {here})\n{self.local}"

    def redistribute(self, *placements: Placement) -> DistributedTensor:
        """Return the same tensor with other placements, one for each axis of the grid. Differentiable.

        Sends the numbers that a rank does not hold yet, each once; a sum that every rank needs is an all-reduce.
        """
        given = placements[0] if len(placements) == 1 else placements  # a list of them, too
        target = Layout.of(self.grid, self.shape, given)
        with self.grid.operation(f"redistribute({describe(self)} to {show(target.placements)})"):
            return to_layout(self, target)

    def full(self) -> Tensor:
        """Return the whole tensor, a plain one, on every rank. Differentiable; every rank passes the same gradient."""
        return self.redistribute(*(Replicate() for _ in self.placements)).local

    def on_root(self, root: int = 0) -> Tensor | None:
        """Return the whole tensor on rank `root`, None elsewhere. Not differentiable."""
        if not 0 <= root < self.grid.world.size:
            raise UsageError(f"on_root: rank {root}; give one from 0 to {self.grid.world.size - 1}")
        with self.grid.operation(f"on_root({describe(self)}, {root})"):
            return gathered(self, root)

    def requires_grad_(self, needed: bool = True) -> DistributedTensor:
        """Let autograd record operations on this tensor."""
        self.local.requires_grad_(needed)
        return self

    @property
    def requires_grad(self) -> bool:
        """True if autograd records operations on this tensor."""
        return self.local.requires_grad

    @property
    def grad(self) -> DistributedTensor | None:
        """The gradient, which lies as the tensor does, replicated where the tensor is a sum of terms. May be set."""
        return None if self.local.grad is None else DistributedTensor(self.local.grad, self.layout.dual())

    @grad.setter
    def grad(self, value: DistributedTensor | None) -> None:
        self.local.grad = None if value is None else to_layout(value, self.layout.dual()).local

    def backward(self, gradient: DistributedTensor | None = None) -> None:
        """Add the gradients of all leaves to their `grad`. gradient: of this tensor; may be left out for one number.

        All ranks call it.
        """
        if not self.requires_grad:
            raise UsageError(
                "backward() of a tensor without history: call requires_grad_() on an operand first"
            )
        with self.grid.operation(f"backward({describe(self)})"):
            if gradient is None:
                if self.shape.numel() != 1:
                    raise UsageError(f"backward() of a shape {list(self.shape)}: give its gradient")
                seed = torch.ones_like(self.local)
            else:
                same_grid([self.grid, gradient.grid], "backward")
                if gradient.shape != self.shape:
                    raise UsageError(
                        f"backward of a shape {list(self.shape)}: the gradient has {list(gradient.shape)}"
                    )
                seed = to_layout(gradient, self.layout.dual()).local
            self.local.backward(seed)

    def detach(self) -> DistributedTensor:
        """Return the same numbers without their history."""
        return DistributedTensor(self.local.detach(), self.layout)

    def clone(self) -> DistributedTensor:
        """Return a copy. Differentiable."""
        return DistributedTensor(self.local.clone(), self.layout)

    def to(self, dtype: torch.dtype) -> DistributedTensor:
        """Return the tensor in another type. Differentiable. A sum of terms is summed first.

        Raises UsageError for anything but a torch.dtype.
        """
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"to({dtype!r}): give a type of torch, such as torch.float64")
        return pointwise("to", lambda x: x.to(dtype), self)

    def __add__(self, other: Operand) -> DistributedTensor:
        return pointwise("add", torch.add, self, other)

    def __sub__(self, other: Operand) -> DistributedTensor:
        return pointwise("sub", torch.sub, self, other)

    def __mul__(self, other: Operand) -> DistributedTensor:
        return pointwise("mul", torch.mul, self, other)

    def __truediv__(self, other: Operand) -> DistributedTensor:
        return pointwise("div", torch.div, self, other)

    def __pow__(self, other: Operand) -> DistributedTensor:
        return pointwise("pow", torch.pow, self, other)

    def __rpow__(self, other: Number) -> DistributedTensor:
        return pointwise("pow", torch.pow, other, self)

    def __radd__(self, other: Number) -> DistributedTensor:
        return pointwise("add", torch.add, other, self)

    def __rsub__(self, other: Number) -> DistributedTensor:
        return pointwise("sub", lambda a, b: a - b, other, self)

    def __rmul__(self, other: Number) -> DistributedTensor:
        return pointwise("mul", torch.mul, other, self)

    def __rtruediv__(self, other: Number) -> DistributedTensor:
        return pointwise("div", lambda a, b: a / b, other, self)

    def __neg__(self) -> DistributedTensor:
        return pointwise("neg", torch.neg, self)

    def __abs__(self) -> DistributedTensor:
        return pointwise("abs", torch.abs, self)

    def __eq__(self, other: Operand) -> DistributedTensor:  # type: ignore[override]
        return pointwise("eq", torch.eq, self, other)

    def __ne__(self, other: Operand) -> DistributedTensor:  # type: ignore[override]
        return pointwise("ne", torch.ne, self, other)

    def __lt__(self, other: Operand) -> DistributedTensor:
        return pointwise("lt", torch.lt, self, other)

    def __le__(self, other: Operand) -> DistributedTensor:
        return pointwise("le", torch.le, self, other)

    def __gt__(self, other: Operand) -> DistributedTensor:
        return pointwise("gt", torch.gt, self, other)

    def __ge__(self, other: Operand) -> DistributedTensor:
        return pointwise("ge", torch.ge, self, other)

    __hash__ = object.__hash__

    def _refuse(self, *_: object) -> Any:
        raise UsageError("a distributed tensor is not a number, a list or an array: x.full() has all numbers")

    __bool__ = __float__ = __int__ = __len__ = __getitem__ = __iter__ = __array__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("local", "layout"):
            raise AttributeError(name)
        raise AttributeError(
            f"a distributed tensor has no {name!r}: x.full().{name} is that of a plain tensor, and pointwise applies "
            f'functions of torch to each number, as in pointwise("exp", torch.exp, x)'
        )

    def __matmul__(self, other: DistributedTensor) -> DistributedTensor:
        return _methods["matmul"](self, other)

    def transpose(self, dim0: int, dim1: int) -> DistributedTensor:
        """Return the tensor with two dimensions exchanged; its pieces stay where they are."""
        a, b = (dimension(d, self.ndim, "transpose") for d in (dim0, dim1))
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self.permute(*order)

    def permute(self, *dims: int | Sequence[int]) -> DistributedTensor:
        """Return the tensor with its dimensions in another order, given one by one or as a list; its pieces stay."""
        listed = dims[0] if len(dims) == 1 else dims
        order = [dimension(d, self.ndim, "permute") for d in integers(listed, "permute: dimensions")]
        if sorted(order) != list(range(self.ndim)):
            raise UsageError(f"permute{dims}: give each of the {self.ndim} dimensions once")
        shape = [self.shape[d] for d in order]
        placements = [
            Shard(order.index(p.dim), p.sizes) if isinstance(p, Shard) else p for p in self.placements
        ]
        return DistributedTensor(self.local.permute(order), Layout.of(self.grid, shape, placements))

    @property
    def T(self) -> DistributedTensor:
        """The transposed matrix; its pieces stay where they are."""
        return self.permute(*reversed(range(self.ndim)))

    def sum(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> DistributedTensor:
        """Return the sum along dimensions; see `reductions.sum`."""
        return _methods["sum"](self, dim, keepdim)

    def mean(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> DistributedTensor:
        """Return the mean along dimensions; see `reductions.mean`."""
        return _methods["mean"](self, dim, keepdim)

    def max(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> DistributedTensor:
        """Return the largest numbers along dimensions; see `reductions.max`."""
        return _methods["max"](self, dim, keepdim)

    def min(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> DistributedTensor:
        """Return the smallest numbers along dimensions; see `reductions.min`."""
        return _methods["min"](self, dim, keepdim)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> DistributedTensor:
        """Return the place of the largest number; see `reductions.argmax`."""
        return _methods["argmax"](self, dim, keepdim)

    def norm(
        self, p: float = 2.0, dim: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> DistributedTensor:
        """Return the vector norm; see `reductions.norm`."""
        return _methods["norm"](self, p, dim, keepdim)


Operand = DistributedTensor | Number


def describe(*operands: object) -> str:
    """Return operands as errors show them: shape, type, placements."""
    return ", ".join(
        f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} {show(x.placements)}"
        if isinstance(x, DistributedTensor)
        else repr(x)
        for x in operands
    )


def dimension(dim: int, dims: int, operation: str) -> int:
    """Return a dimension of a tensor with `dims`, counted from 0. Raises UsageError if it has no such dimension."""
    dim = integer(dim, f"{operation}: dimension")
    if not -dims <= dim < dims:
        raise UsageError(
            f"{operation}: dimension {dim} of a tensor with {dims}; give one from 0 to {dims - 1}"
        )
    return dim % dims


def to_layout(x: DistributedTensor, target: Layout) -> DistributedTensor:
    """Return x in another layout. Differentiable; for use inside operations."""
    if x.layout == target:
        return x
    back = target.dual(), x.layout.dual()
    found = linear_map(x.local, lambda y: moved(y, x.layout, target), lambda dy: moved(dy, *back))
    return DistributedTensor(found, target)


def on_one_rank(grid: Grid, shape: Sequence[int], root: int) -> Layout:
    """Return the layout that gives one rank everything; shape has as many dimensions as the grid, or more."""
    placements = [
        Shard(axis, tuple(shape[axis] if i == at else 0 for i in range(n)))
        for axis, (at, n) in enumerate(zip(grid.places[root], grid.shape, strict=True))
    ]
    return Layout.of(grid, shape, placements)


def gathered(x: DistributedTensor, root: int) -> Tensor | None:
    """Return the whole tensor on rank `root`, None elsewhere; not differentiable."""
    more = (1,) * max(0, len(x.grid.shape) - x.ndim)  # a grid of two axes cuts two dimensions
    wide = Layout.of(x.grid, (*x.shape, *more), x.placements)
    piece = x.local.detach().reshape(wide.local_shape)
    whole = moved(piece, wide, on_one_rank(x.grid, wide.shape, root))
    return whole.view(x.shape) if x.grid.world.rank == root else None


def brought(x: DistributedTensor, target: Layout, shared: Sequence[int]) -> Tensor:
    """Return this rank's piece of x in another layout, for a local operation. Differentiable.

    shared: axes of the grid along which x becomes replicated and each rank uses it for another part of the result.
    Each then has a term of the gradient; the terms are summed on their way back.
    """
    if not target.grid.world.size > 1:
        return x.local
    terms = target.dual().placed(
        *(Partial() if a in shared else p for a, p in enumerate(target.dual().placements))
    )
    back = x.layout.dual()
    if x.layout == target and terms == back:
        return x.local
    return linear_map(x.local, lambda y: moved(y, x.layout, target), lambda dy: moved(dy, terms, back))


def settled(layout: Layout) -> Layout:
    """Return the layout in which the terms are summed and split along the longest dimension."""
    if not layout.partial:
        return layout
    cut = {p.dim for p in layout.placements if isinstance(p, Shard)}
    free = [d for d in range(len(layout.shape)) if d not in cut] or [*range(len(layout.shape))]
    best: Placement = Shard(max(free, key=lambda d: layout.shape[d])) if free else Replicate()
    return layout.placed(*together([best if isinstance(p, Partial) else p for p in layout.placements]))


def pointwise(name: str, function: Callable[..., Tensor], *operands: Operand) -> DistributedTensor:
    """Apply an elementwise function of torch to broadcast operands. Differentiable.

    A function that mixes elements, such as a softmax, gives wrong numbers: it sees this rank's piece only.

    The result lies as the largest operand does, terms summed and split; the others follow it. Sends what they lack.
    Raises UsageError if no operand is distributed, for shapes that do not broadcast, and for a function that returns
    another shape.
    """
    if not callable(function):
        raise UsageError(
            'pointwise: give a name, a function and operands, as in pointwise("exp", torch.exp, x)'
        )
    grid = common_grid([x for x in operands if not isinstance(x, numbers.Number)], name)
    tensors = [x for x in operands if isinstance(x, DistributedTensor)]
    try:
        shape = torch.Size(np.broadcast_shapes(*(x.shape for x in tensors)))  # torch's imports SymPy: seconds
    except ValueError:
        raise UsageError(f"{name}: shapes {describe(*tensors)} do not broadcast") from None
    with grid.operation(f"{name}({describe(*operands)})"):
        leading = max(
            tensors, key=lambda x: (x.shape.numel(), any(isinstance(p, Shard) for p in x.placements))
        )
        result = _lifted(settled(leading.layout), shape)
        found = [aligned(x, result) if isinstance(x, DistributedTensor) else x for x in operands]
        made = function(*found)
        if tuple(made.shape) != result.local_shape:
            raise UsageError(
                f"{name}: the function returns {list(made.shape)} for a piece of {list(result.local_shape)}; "
                "give one that returns a number for each"
            )
        return DistributedTensor(made, result)


def common_grid(operands: Sequence[object], name: str) -> Grid:
    """Return the grid that all operands lie on.

    Raises UsageError if they differ, if one is a plain tensor, or if there is none.
    """
    if not operands:
        raise UsageError(f"{name}: give at least one distributed tensor")
    if bad := [x for x in operands if not isinstance(x, DistributedTensor)]:
        raise UsageError(
            f"{name} of a {type(bad[0]).__name__}: from_full(x, grid, Replicate()) makes a distributed tensor of it, "
            "float(x) a number"
        )
    return same_grid([x.grid for x in operands if isinstance(x, DistributedTensor)], name)


def _lifted(layout: Layout, shape: torch.Size) -> Layout:
    """Return the layout of a result of `shape` that an operand's layout is broadcast to."""
    more = len(shape) - len(layout.shape)
    placements: list[Placement] = []
    for p in layout.placements:
        if isinstance(p, Shard) and layout.shape[p.dim] == shape[p.dim + more]:
            placements.append(Shard(p.dim + more, p.sizes))
        elif isinstance(p, Replicate):
            placements.append(p)
        else:
            placements.append(Shard(max(range(len(shape)), key=lambda d: shape[d])) if shape else Replicate())
    return Layout.of(layout.grid, shape, together(placements))


def aligned(x: DistributedTensor, result: Layout) -> Tensor:
    """Return the piece of x that broadcasts to this rank's piece of the result."""
    more, placements, shared = len(result.shape) - x.ndim, list[Placement](), []
    for axis, p in enumerate(result.placements):
        if isinstance(p, Shard) and p.dim >= more and x.shape[p.dim - more] == result.shape[p.dim]:
            placements.append(Shard(p.dim - more, p.sizes))
        else:
            placements.append(Replicate())
            if isinstance(p, Shard):
                shared.append(axis)
    return brought(x, Layout.of(x.grid, x.shape, placements), shared)
