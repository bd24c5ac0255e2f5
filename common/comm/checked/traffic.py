"""Every collective: which types it takes along its group's axes, and which it gives.

The functions of calls.py know nothing of gradients; `sums` and GIVES state their types. Those of collectives.py
declare theirs with @typed; what is said to be the same on all ranks must be: the input of `copy` and `scatter`, and the
gradient of what `reduce` and `gather` give. A gradient arrives in a hook, with the dual of its tensor's type.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from common.comm import hooks
from common.comm.checked.meeting import Meeting
from common.comm.checked.report import Report
from common.comm.checked.table import Kinds, Table
from common.comm.checked.types import I, Kind, P, S, V, dual
from common.comm.frames import line_of_user
from common.comm.group import Group

GIVES = {"all_reduce": I, "broadcast": I, "all_gather_into": I, "reduce_scatter_into": S}  # others: V
Places = Mapping[int, Mapping[str, int]]  # global rank: its place along each axis


@lru_cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function."""
    return inspect.signature(function)


def arguments(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def sums(name: str, op: str) -> bool:
    """Return True if a function of calls.py adds up its input over the ranks."""
    return name in ("reduce", "reduce_scatter_into") or (name == "all_reduce" and op in ("sum", "avg"))


class Traffic:
    """Check the types of tensors that enter collectives, and give types to those that leave."""

    def __init__(self, table: Table, report: Report, meeting: Meeting, places: Places) -> None:
        self.table, self.report, self.meeting, self.places = table, report, meeting, places
        self.covered: dict[tuple[int, ...], tuple[tuple[str, ...], bool]] = {}

    def axes_of(self, group: Group) -> tuple[tuple[str, ...], bool]:
        """Return the axes along which the ranks of a group differ, and whether it has all of their ranks."""
        if group.ranks not in self.covered:
            here = [self.places[rank] for rank in group.ranks]
            axes = tuple(axis for axis in here[0] if len({place[axis] for place in here}) > 1)
            sizes = [1 + max(place[axis] for place in self.places.values()) for axis in axes]
            self.covered[group.ranks] = axes, math.prod(sizes) == len(group.ranks)
        return self.covered[group.ranks]

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Check a function of calls.py, run it, and give its result a type."""
        given, name = arguments(function, args, kwargs), function.__name__
        group: Group = given["group"]
        if group.size == 1 or not set(group.ranks) <= set(self.places):
            return function(*args, **kwargs)
        views = name == "all_to_all_views"
        x, (axes, complete) = given["pieces"][group.rank] if views else given.get("x"), self.axes_of(group)
        known = axes if complete else ()
        if x is None:  # a barrier, or objects
            self.meeting.call(name, group, known)()
            return function(*args, **kwargs)
        if name == "recv":  # its sender need not be at a call of ours
            result = function(*args, **kwargs)
            self.table.note(x, {}, written=True)
            return result
        before = self.table.kinds(x)
        self._allow(name, x, before, known, given.get("op", "sum"))
        details = [given.get(detail) for detail in ("op", "send_sizes", "receive_sizes")]
        compare = self.meeting.call(name, group, known, x, details)
        result = self._run(function, args, kwargs, compare, bool(given.get("async_op")))
        after = dict(before)
        for axis in axes:
            after[axis] = GIVES.get(name, V) if complete or before.get(axis) == P else V
        for out in given["places"] if views else [given.get("out", x)]:
            self.table.note(out, after, written=True)
        return result

    def _allow(self, name: str, x: Tensor, kinds: Kinds, axes: Sequence[str], op: str) -> None:
        """Check the type of what goes into a function of calls.py."""
        for axis in axes:
            kind = kinds.get(axis)
            if kind is None or (op == "avg" and kind.letter in "IR"):
                continue
            if sums(name, op) and kind.letter in "IRSQ":
                what = "different shards" if kind.letter == "S" else "equal terms"
                self.report.wrong("sum", self.table.describe(x), axis, f"is {kind}: {name} would add {what}")
            if name == "all_gather_into" and kind == P:
                text = "is P: its terms are gathered, not summed"
                self.report.wrong("sum", self.table.describe(x), axis, text)

    def _run(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        compare: Callable[[], None],
        later: bool,
    ) -> Any:
        """Run a call after the comparison; later: compare when it is waited for."""
        if not later:
            compare()
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
        if later:
            result.wait = partial(self._compare_and_wait, compare, result.wait)
        return result

    def _compare_and_wait(self, compare: Callable[[], None], wait: Callable[[], None]) -> None:
        compare()
        with torch._C.DisableTorchFunction():
            wait()

    def collective(
        self, function: Callable[..., Any], takes: str, gives: str, args: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Check a function of collectives.py: the type of its input, and that replicas are equal; type its result."""
        given, name = arguments(function, args, kwargs), function.__name__
        x, group = given["x"], given["group"]
        axes, complete = self.axes_of(group)
        if group.size == 1 or not complete:
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        before = self.table.kinds(x)
        for axis in axes:
            kind = before.get(axis)
            if kind is not None and kind.letter not in takes:
                text = f"is {kind}; {name} takes {' or '.join(takes)}"
                self.report.wrong("call", self.table.describe(x), axis, text)
        if takes == "I":
            self.meeting.call(name, group, axes, x, replica=True)()
        self._fits(x, given.get("sizes"), given.get("dim"), group, "+".join(axes))
        y: Tensor = function(*args, **kwargs)
        kind = result_kind(gives, given.get("gradient"), given.get("dim"), y)
        kinds = {**before, **dict.fromkeys(axes, kind)}
        self.table.note(y, kinds)
        if y.requires_grad:
            same = partial(self.meeting.call, f"gradient of {name}", group, axes, replica=True)
            self._follow_gradient(y, kinds, same if kind == I else None)
        return y

    def _fits(self, x: Tensor, sizes: Sequence[int] | None, dim: int | None, group: Group, axis: str) -> None:
        if sizes and dim is not None and sizes[group.rank] != x.shape[dim]:
            text = f"has {x.shape[dim]} of dimension {dim}, where its whole is cut into {list(sizes)}"
            self.report.wrong("meet", self.table.describe(x), axis, text)

    def applied(self, out: Any) -> None:
        """Follow the gradients of an autograd function's results, which its backward will get."""
        for y in out if isinstance(out, tuple) else (out,):
            if isinstance(y, Tensor) and y.requires_grad and not y.is_leaf and (kinds := self.table.kinds(y)):
                self._follow_gradient(y, kinds)

    def _follow_gradient(self, y: Tensor, kinds: Kinds, same: Callable[..., Any] | None = None) -> None:
        duals, line = {axis: dual(kind) for axis, kind in kinds.items()}, line_of_user()

        def arrived(dy: Tensor) -> None:
            if hooks.active is not None and hooks.active.traffic is self:
                self.table.note(dy, duals, line=f"the gradient of {line}")
                if same:
                    same(dy)()

        y.register_hook(arrived)


def result_kind(gives: str, gradient: str | None, dim: int | None, y: Tensor) -> Kind:
    """Return the type of a collective's result: as declared, but R if its gradient is partial, and S with its dim."""
    if gradient == "partial":
        return Kind("R")
    if gives == "S" and dim is not None:
        return Kind("S", dim if dim < 0 else dim - y.ndim)
    return Kind(gives)
