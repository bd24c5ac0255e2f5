"""Every operation of torch: its result gets, along each axis, the type that the operands' types give.

`join` in types.py decides by the operation's name. Here stand the cases that need more than the name: a product and a
lookup with a cut matrix, a sum over a cut dimension, a replica divided by the number of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from common.comm.checked.report import Report
from common.comm.checked.table import Kinds, Table
from common.comm.checked.types import (
    ADDS_UP,
    MATRIX,
    PRODUCTS,
    QUOTIENTS,
    Broken,
    I,
    Kind,
    P,
    R,
    S,
    V,
    join,
    product,
)

UNTYPED = set("grad __set__ register_hook backward shape item tolist size dim numel grad_fn".split())
# of these the second tensor gives a shape or a dtype only
LIKE = set("view_as expand_as type_as reshape_as to".split())
# a broadcast writes into p.data, so its values before are not used
READS_NO_VALUE = {"data", "detach"}


@dataclass(frozen=True)
class Operation:
    """A call of torch: its name, its operands in order, and into which of them a gradient will flow."""

    name: str
    operands: Sequence[Tensor]
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] | None = None

    @property
    def flows(self) -> list[bool]:
        """True for each operand into which a gradient will flow."""
        return [torch.is_grad_enabled() and x.requires_grad for x in self.operands]

    def dims(self) -> list[int] | None:
        """Return the dimensions of the first operand that `sum` and `mean` add up, from the last, -1; None: all."""
        given = (self.kwargs or {}).get("dim", self.args[1] if len(self.args) > 1 else None)
        if given is None:
            return None
        dims = [given] if isinstance(given, int) else list(given)
        return [dim if dim < 0 else dim - self.operands[0].ndim for dim in dims]


def along_axis(op: Operation, kinds: Sequence[Kind | None], holders: Collection[int]) -> Kind | None:
    """Return the type of the result along an axis from those of the operands. Raises Broken.

    holders: numbers of ranks that may hold a replica along this axis.
    """
    if op.name == "embedding" and (w := kinds[1]) is not None and w.letter in "SR":
        return {-2: P, -1: w}.get(w.dim or 0, V) if w.letter == "S" else V
    if op.name == "addmm_":  # a product, then a sum
        term = along_axis(Operation("mm", op.operands[1:]), kinds[1:], holders)
        return join("add_", [kinds[0], term], [*op.flows[:1], False])
    if is_share(op, kinds, holders) or is_packed(op, kinds):
        return None
    kind = join(op.name, kinds, op.flows)
    if op.name in MATRIX and len(kinds) > 1 and P not in kinds:
        return of_matrices(op.name, kinds) or kind
    if op.name in ADDS_UP and (x := kinds[0]) is not None and x.letter == "S":
        return of_added(op, x)
    return kind


def is_share(op: Operation, kinds: Sequence[Kind | None], holders: Collection[int]) -> bool:
    """Return True if a replica is divided by a multiple of the number of its ranks.

    The result is a term of a sum over these ranks, or still a replica.
    """
    numbers = [a for a in op.args if isinstance(a, int | float)]
    if len(kinds) != 1 or kinds[0] not in (I, R) or not numbers or (kinds[0] == I and op.flows[0]):
        return False
    by = numbers[0] if op.name in QUOTIENTS else 1 / numbers[0] if op.name in PRODUCTS and numbers[0] else 0
    return any(by >= n and abs(by / n - round(by / n)) < 1e-9 for n in holders)


def is_packed(op: Operation, kinds: Sequence[Kind | None]) -> bool:
    """Return True if tensors of several types are joined into one message; `split` gives each its type again."""
    letters = {k.letter for k in kinds if k is not None}
    return op.name == "cat" and "P" in letters and bool(letters - {"P", "V"})


def of_matrices(name: str, kinds: Sequence[Kind | None]) -> Kind | None:
    """Return the type of a product with a cut matrix, to which a bias may be added. Raises Broken."""
    x, w, *bias = kinds if name != "addmm" else (kinds[1], kinds[2], kinds[0])
    inner, outer = (-1, -2) if name == "linear" else (-2, -1)
    made = product(x, w, inner, outer)
    if made == P and bias and bias[0] is not None:
        join("add", [P, bias[0]], [False, False])
    return made


def of_added(op: Operation, x: Kind) -> Kind:
    """Return the type of a sum or mean of a shard: a term of the whole's sum if it adds up the cut dimension."""
    dims, term = op.dims(), P if op.name == "sum" else V
    if dims is None:
        return term
    if x.dim is None:
        return V
    return term if x.dim in dims else S


class Operations(TorchFunctionMode):
    """Mode that sees every operation of this thread. reads: called with each parameter whose values are read."""

    def __init__(self, table: Table, report: Report, reads: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.table, self.report, self.reads = table, report, reads
        self.packed = WeakIdKeyDictionary()  # result of cat: the types of what it joined
        self.paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused:
            self.see(func, args, kwargs or {}, out)
        return out

    def see(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Give the result of an operation its types."""
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name == "__get__" else name
        if name in UNTYPED or name.startswith("new_") or name.endswith("_like"):
            return
        given = (args, {key: value for key, value in kwargs.items() if key != "out"})
        operands = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        operands = operands[:1] if name in LIKE else operands
        out = args[0] if name == "__setitem__" else out
        results = [y for y in tree_leaves(out) if isinstance(y, Tensor)]
        if not results or not operands:
            return
        if name == "copy_":
            self.table.note(out, self.table.kinds(args[1]), written=True)
        elif name.startswith("_foreach_") and len(results) == len(args[0]):
            for i, y in enumerate(results):
                one = [given[i] if isinstance(given, list | tuple) else given for given in args]
                self.give(Operation(name, [x for x in one if isinstance(x, Tensor)], one), [y])
        else:
            self.give(Operation(name, operands, args, kwargs), results)

    def give(self, op: Operation, results: list[Tensor]) -> None:
        """Give results their types along all axes; raise Misplaced if a rule is broken."""
        every = [self.table.kinds(x) for x in op.operands]
        if not any(every):
            return
        if torch.is_grad_enabled() and op.name not in READS_NO_VALUE:
            for x in op.operands:
                if isinstance(x, nn.Parameter):
                    self.reads(x)
        kinds = Kinds()
        for axis, holders in self.table.holders.items():
            along = [of_one.get(axis) for of_one in every]
            try:
                kind = along_axis(op, along, holders)
            except Broken as broken:
                rule, text, at = broken.args
                tensor = self.table.describe(op.operands[at])
                self.report.wrong(rule, tensor, axis, f"is {along[at]} and {text}")
                kind = V
            if kind is not None:
                kinds[axis] = kind
        into = (op.operands[0], (op.kwargs or {}).get("out"))
        changed = any(results[0] is x for x in into) and op.name != "requires_grad_"
        packed = self.packed.get(op.operands[0], ()) if op.name in ("split", "split_with_sizes") else ()
        for i, y in enumerate(results):
            own = {**packed[i], **kinds} if len(packed) == len(results) else kinds
            self.table.note(y, own, written=changed)
        if op.name == "cat":
            self.packed[results[0]] = every
