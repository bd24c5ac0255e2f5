"""Types of tensors: those that operations and collectives noted, and those of parameters, from their placement.

A parameter is S along the axes that split it, R along those over which its gradient will be summed, otherwise I. Along
pp it is S, for a stage owns it, and R if it is tied. Its gradient gets the dual type when it arrives.

An operation in place changes the type of every tensor that shares the memory. So a storage remembers the types that
were written into it last; a tensor whose own note is older takes them over.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from common.comm.checked.types import I, Kind, R, S, dual
from common.comm.frames import line_of_user
from common.comm.placement import Shard, gradient_axes, placement

Kinds = dict[str, Kind]
Changed = Mapping[str, Kind | None]  # None: several views of the memory were written, with different types


def kinds_of_parameter(p: Tensor, axes: Collection[str]) -> Kinds:
    """Return the types of a parameter, which follow from its placement."""
    lies = {axis: split for along, split in placement(p).items() for axis in along.split("+")}
    sums, kinds = gradient_axes(p), Kinds()
    for axis in axes:
        if axis in lies:
            split = lies[axis]
            kinds[axis] = Kind("S", split.dim - p.ndim) if isinstance(split, Shard) else S
        elif axis == "pp":
            kinds[axis] = R if hasattr(p, "tied") else S
        else:
            kinds[axis] = R if axis in sums else I
    return kinds


class Table:
    """Types, names and lines of origin of all tensors of this rank."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes, self.clock = axes, itertools.count(1)
        self.holders = {axis: {n} for axis, n in axes.items()}  # numbers of ranks that may hold a replica
        self.noted = WeakIdKeyDictionary()  # tensor: (time, kinds, line)
        self.written: dict[int, tuple[StorageWeakRef, int, Changed]] = {}  # storage: (itself, time, kinds)
        self.parameters = WeakIdKeyDictionary()  # parameter: (what its kinds follow from, kinds)
        self.declared = WeakIdKeyDictionary()  # parameter: kinds that do not follow from its placement
        self.names = WeakIdKeyDictionary()
        self.hooks: list[Any] = []

    def kinds(self, x: Tensor) -> Kinds:
        """Return the types of x along the axes on which it has one."""
        if isinstance(x, nn.Parameter):
            return {} if x.is_meta else self._of_parameter(x)
        time, kinds, _ = self.noted.get(x, (0, {}, ""))
        storage = x.untyped_storage() if self.written else None
        if storage is None or storage._cdata not in self.written:
            return dict(kinds)
        reference, when, changed = self.written[storage._cdata]
        if when <= time or reference.expired():
            return dict(kinds)
        whole = x.nbytes == storage.nbytes()
        news = {axis: kind for axis, kind in changed.items() if kind is not None or whole}
        return {axis: kind for axis, kind in {**kinds, **news}.items() if kind is not None}

    def note(self, x: Tensor, kinds: Kinds, written: bool = False, line: str = "") -> None:
        """Remember the types of x. written: x was changed in place, and so were tensors that share its memory."""
        if isinstance(x, nn.Parameter):
            return  # its types follow from its placement
        now = next(self.clock)
        self.noted[x] = (now, kinds, line or line_of_user())
        if written:
            storage, changed = x.untyped_storage(), dict[str, Kind | None](kinds)
            reference, _, old = self.written.get(storage._cdata, (None, 0, {}))
            if reference and not reference.expired() and x.nbytes < storage.nbytes():
                changed = {a: kind if old.get(a) == kind else None for a, kind in {**old, **changed}.items()}
            self.written[storage._cdata] = (StorageWeakRef(storage), now, changed)

    def forget(self) -> None:
        """Drop what was written into memory that has been freed."""
        self.written = {key: entry for key, entry in self.written.items() if not entry[0].expired()}

    def describe(self, x: Tensor) -> str:
        """Return the name of a tensor for people: a parameter's own, else type, shape and line of origin."""
        if name := self.names.get(x):
            return str(name)
        line = f" of {self.noted[x][2]}" if x in self.noted else ""
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{line}"

    def _of_parameter(self, p: Tensor) -> Kinds:
        said = placement(p), gradient_axes(p), hasattr(p, "tied"), self.declared.get(p)
        if p not in self.parameters or self.parameters[p][0] != said:
            kinds = {**kinds_of_parameter(p, self.axes), **self.declared.get(p, {})}
            self.parameters[p] = said, kinds
            if hasattr(p, "tied") and "pp" in self.axes:
                self.holders["pp"].add(p.tied.size)
            if p.requires_grad:
                self._follow_gradient(p, {axis: dual(kind) for axis, kind in kinds.items()})
        return dict(self.parameters[p][1])

    def _follow_gradient(self, p: Tensor, kinds: Kinds) -> None:
        def arrived(p: Tensor) -> None:
            if p.grad is not None:
                self.note(p.grad, kinds, written=True)
                self.names[p.grad] = f"the gradient of {self.describe(p)}"

        hook = p.register_post_accumulate_grad_hook(arrived)
        # before the hooks that send it
        p._post_accumulate_grad_hooks.move_to_end(hook.id, last=False)  # type: ignore[attr-defined]
        self.hooks.append(hook)
