"""Checker of placements while a lesson runs: `with checked(mesh):` around training on small tensors.

    with checked(mesh):                    # a Mesh, or the Group of one axis
        loss = model(tokens_BS) ...        # a forgotten `copy` raises Misplaced here, naming tensor, axis, rank, line
        loss.backward()
        sum_gradients(model.parameters(), mesh)
        optimizer.step()                   # a gradient that is still partial raises here

Every tensor remembers its type along each axis (types.py). A parameter's follows from its placement: S where it is
split, R along the axes over which its gradient will be summed, otherwise I. The result of an operation gets its type
from the operands by the rules of types.py; that of a collective is declared in collectives.py and calls.py; a gradient
arrives in a hook with the dual of its tensor's type. Three more rules hold at run time.

    meet     before a collective, all ranks of its group exchange call, shape, dtype and type, through the store
             that the process group was made with, and compare them: no rank can hang or read garbage.
    equal    in the same message travel sums of the tensor, if it is said to be the same on all ranks, and of the
             replicated parameters that this rank has used since the last message; they must be equal within rounding.
    step     when an optimizer steps, the gradient of a parameter must be complete along every axis that
             replicates the parameter.

The message is not in the ledger. Modes of torch hold per thread, so the backward pass is checked on CPUs alone.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from common.comm import hooks
from common.comm.group import Group
from common.comm.mesh import Mesh
from common.comm.placement import Shard, gradient_axes, placement
from common.comm.types import (
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
    dual,
    join,
    product,
)

Kinds = dict[str, Kind]
Changed = dict[str, Kind | None]  # None: views of one memory differ
RULES = ("mix", "linear", "once", "root", "sum", "call", "meet", "equal", "step")
MACHINERY = (
    *(os.path.dirname(file) for file in (torch.__file__, os.__file__, __file__)),
    str(Path(__file__).parents[1] / "lesson"),
)
IGNORED = {
    "grad",
    "__set__",
    "register_hook",
    "backward",
    "shape",
    "item",
    "tolist",
    "size",
    "dim",
    "numel",
    "grad_fn",
}
LIKE = {
    "view_as",
    "expand_as",
    "type_as",
    "reshape_as",
    "to",
}  # the second tensor gives a shape or a type only
RUNS = itertools.count()


class Misplaced(AssertionError):
    """A tensor is used as if it lay otherwise; the message names the rule, tensor, axis, rank and line."""

    def __init__(self, rule: str, tensor: str, axis: str, rank: int, line: str, wrong: str) -> None:
        super().__init__(rule, tensor, axis, rank, line, wrong)
        self.rule, self.tensor, self.axis, self.rank, self.line, self.wrong = self.args

    def __str__(self) -> str:
        return (
            f"{self.line}: rank {self.rank}, axis {self.axis}: {self.tensor} {self.wrong} [rule: {self.rule}]"
        )


def line_of_user() -> str:
    """Return file:line of the innermost frame outside of torch, Python's library and common/comm."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*MACHINERY, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def fingerprint(x: Tensor) -> tuple[float, float, float]:
    """Return (sum of magnitudes, sum, sum with weights that differ by position) of x, in float64."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        flat = x.detach().double().flatten().cpu()
        weights = torch.arange(1.0, len(flat) + 1, dtype=torch.float64).cos()
        return flat.abs().sum().item(), flat.sum().item(), (flat @ weights).item()


def unlike(a: Sequence[float], b: Sequence[float], epsilon: float) -> bool:
    """Return True if two fingerprints differ by more than rounding."""
    return any(
        abs(x - y) > math.sqrt(epsilon) * max(a[0], b[0]) or math.isnan(x) != math.isnan(y)
        for x, y in zip(a, b, strict=True)
    )


@lru_cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function."""
    return inspect.signature(function)


class Checker(TorchFunctionMode):
    """Table of the tensors' types, and the rules."""

    def __init__(self, mesh: Mesh, timeout: float, rules: Sequence[str]) -> None:
        super().__init__()
        self.mesh, self.timeout, self.rules = mesh, timeout, rules
        self.axes = {axis: n for axis, n in mesh.shape.items() if n > 1}
        self.run, self.calls, self.bytes = next(RUNS), dict[Any, int](), 0
        self.clock = itertools.count(1)
        self.kinds_of = WeakIdKeyDictionary()  # tensor: (time, kinds, line)
        self.written: dict[int, tuple[StorageWeakRef, int, Changed]] = {}  # storage: in-place writes
        self.parameters = WeakIdKeyDictionary()  # parameter: kinds
        self.parts = WeakIdKeyDictionary()  # result of cat: the types of what it joined
        self.said = WeakIdKeyDictionary()  # parameter: what the kinds follow from
        self.names = WeakIdKeyDictionary()
        self.used = (
            WeakIdKeyDictionary()
        )  # parameter: (fingerprint at its first use in this step, axes compared)
        self.covered: dict[tuple[int, ...], tuple[tuple[str, ...], bool]] = {}
        self.handles: list[Any] = []
        self.stepping = self.reading = False

    # ---- the table

    def kinds(self, x: Tensor) -> Kinds:
        """Return the types of x along the axes on which it has one."""
        if isinstance(x, nn.Parameter):
            return {} if x.is_meta else self.of_parameter(x)
        at, kinds, _ = self.kinds_of.get(x, (0, {}, ""))
        if self.written and (entry := self.written.get(x.untyped_storage()._cdata)) and entry[1] > at:
            if entry[0].expired():
                return kinds  # type: ignore[no-any-return]
            whole = x.nbytes == x.untyped_storage().nbytes()
            changed = {a: k for a, k in entry[2].items() if k is not None or whole}  # None: views differ
            return {a: k for a, k in {**kinds, **changed}.items() if k is not None}
        return kinds  # type: ignore[no-any-return]

    def note(self, x: Tensor, kinds: Kinds, written: bool = False, line: str = "") -> None:
        """Remember the types of x. written: x was changed in place, and so were tensors that share its memory."""
        if isinstance(x, nn.Parameter):
            return
        now = next(self.clock)
        self.kinds_of[x] = (now, kinds, line or line_of_user())
        if written:
            storage = x.untyped_storage()
            before = self.written.get(storage._cdata)
            changed: Changed = {**kinds}
            if before and not before[0].expired() and x.nbytes < storage.nbytes():
                old = before[2]
                changed = {axis: k if old.get(axis) == k else None for axis, k in {**old, **changed}.items()}
            self.written[storage._cdata] = (StorageWeakRef(storage), now, changed)

    def of_parameter(self, p: Tensor) -> Kinds:
        """Return the types of a parameter, which follow from its placement."""
        said = placement(p), gradient_axes(p), hasattr(p, "tied")
        if p not in self.parameters or self.said[p] != said:
            self.said[p], lies, sums, kinds = said, said[0], said[1], Kinds()
            for axis in self.axes:
                if axis in lies:
                    split = lies[axis]
                    kinds[axis] = Kind("S", split.dim - p.ndim) if isinstance(split, Shard) else S
                elif axis == "pp":
                    kinds[axis] = R if hasattr(p, "tied") else S
                else:
                    kinds[axis] = R if axis in sums else I
            self.parameters[p] = kinds
            if p.requires_grad:
                self._follow_gradient(p, {axis: dual(kind) for axis, kind in kinds.items()})
        freed = p.untyped_storage().nbytes() < p.nbytes  # in ZeRO's stage 3
        if self.reading and p not in self.used and not freed:
            self.used[p] = fingerprint(p), set()
        return self.parameters[p]  # type: ignore[no-any-return]

    def _follow_gradient(self, p: Tensor, kinds: Kinds) -> None:
        def arrived(p: Tensor) -> None:
            if p.grad is not None:
                self.note(p.grad, kinds, written=True)
                self.names[p.grad] = f"the gradient of {self.describe(p)}"

        handle = p.register_post_accumulate_grad_hook(arrived)
        # before the hooks that send it
        p._post_accumulate_grad_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        self.handles.append(handle)

    def describe(self, x: Tensor) -> str:
        """Return the name of a tensor for people."""
        if name := self.names.get(x):
            return str(name)
        line = self.kinds_of[x][2] if x in self.kinds_of else ""
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" + (f" of {line}" if line else "")

    def wrong(self, rule: str, x: Tensor | str, axis: str, text: str) -> None:
        """Raise Misplaced, if the rule is on."""
        if rule in self.rules:
            name = x if isinstance(x, str) else self.describe(x)
            raise Misplaced(rule, name, axis, self.mesh.world.rank, line_of_user(), text)

    # ---- operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.stepping:
            self.see(func, args, kwargs or {}, out)
        return out

    def see(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Give the result of an operation its types."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name in IGNORED or name.startswith("new_") or name.endswith("_like"):
            return
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in LIKE:
            operands = operands[:1]
        if name == "__setitem__":
            out = args[0]
        results = [y for y in tree_leaves(out) if isinstance(y, Tensor)]
        if not results or not operands:
            return
        if name == "copy_":
            self.note(out, self.kinds(args[1]), written=True)
            return
        if name.startswith("_foreach_") and len(results) == len(args[0]):
            for i, y in enumerate(results):
                one = [given[i] if isinstance(given, list | tuple) else given for given in args]
                self._typed(name, [x for x in one if isinstance(x, Tensor)], one, {}, [y])
            return
        self._typed(name, operands, args, kwargs, results)

    def _typed(
        self, name: str, operands: list[Tensor], args: Any, kwargs: dict[str, Any], results: list[Tensor]
    ) -> None:
        # a broadcast writes into p.data: its values before do not count as used
        self.reading = name not in ("data", "detach") and torch.is_grad_enabled()
        every = [self.kinds(x) for x in operands]
        self.reading = False
        if not any(every):
            return
        flows = torch.is_grad_enabled()
        gradients = [flows and x.requires_grad for x in operands]
        kinds = Kinds()
        for axis, n in self.axes.items():
            along = [k.get(axis) for k in every]
            try:
                kind = self._along(name, along, gradients, operands, args, kwargs, n)
            except Broken as broken:
                rule, text, at = broken.args
                self.wrong(rule, operands[at], axis, f"is {along[at]} and {text}")
                kind = V
            if kind is not None:
                kinds[axis] = kind
        changed = results[0] is operands[0] and name != "requires_grad_"
        parts = self.parts.get(operands[0], ()) if name in ("split", "split_with_sizes") else ()
        for i, y in enumerate(results):
            self.note(y, {**parts[i], **kinds} if len(parts) == len(results) else kinds, written=changed)
        if name == "cat":
            self.parts[results[0]] = every

    def _along(
        self,
        name: str,
        along: list[Kind | None],
        gradients: list[bool],
        operands: list[Tensor],
        args: Any,
        kwargs: dict[str, Any],
        n: int,
    ) -> Kind | None:
        if name == "embedding":
            w = along[1]
            if w is not None and w.letter in "SR":
                return {-2: P, -1: w}.get(w.dim or 0, V) if w.letter == "S" else V
        numbers = [a for a in args if isinstance(a, int | float)]
        if name in PRODUCTS | QUOTIENTS and len(along) == 1 and numbers and along[0] in (I, R):
            times = numbers[0] if name in QUOTIENTS else 1 / numbers[0] if numbers[0] else 0
            if (
                times >= n
                and abs(times / n - round(times / n)) < 1e-9
                and not (along[0] == I and gradients[0])
            ):
                return (
                    None  # a replica divided by the ranks that hold it: a term of a sum, or still a replica
                )
        letters = {k.letter for k in along if k is not None}
        if name == "cat" and "P" in letters and letters - {"P", "V"}:
            return None  # a message of several tensors; `split` gives each its type again
        kind = join(name, along, gradients)
        if name in MATRIX and len(along) > 1 and P not in along:
            x, w, *bias = along if name != "addmm" else (along[1], along[2], along[0])
            inner, outer = (-1, -2) if name == "linear" else (-2, -1)
            made = product(x, w, inner, outer)
            if made == P and bias and bias[0] is not None:
                join("add", [P, bias[0]], [False, False])
            return made or kind
        if name in ADDS_UP and along[0] is not None and along[0].letter == "S":
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dims is None:
                return P if name == "sum" else V
            dims = [dims] if isinstance(dims, int) else list(dims)
            cut = along[0].dim
            if cut is None:
                return V
            return (
                (P if name == "sum" else V)
                if cut in [d if d < 0 else d - operands[0].ndim for d in dims]
                else S
            )
        return kind

    # ---- collectives

    def axes_of(self, group: Group) -> tuple[tuple[str, ...], bool]:
        """Return the axes along which the ranks of a group differ, and whether it has all of their ranks."""
        if group.ranks not in self.covered:
            world = self.mesh.world.ranks
            places = [self.mesh.coordinates(world.index(rank)) for rank in group.ranks if rank in world]
            axes = tuple(a for a in self.axes if len({place[a] for place in places}) > 1)
            self.covered[group.ranks] = axes, math.prod(self.axes[a] for a in axes) == len(group.ranks)
        return self.covered[group.ranks]

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Check a function of calls.py, run it, and give its result a type."""
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given, name = bound.arguments, function.__name__
        group: Group = given["group"]
        if group.size == 1 or not set(group.ranks) <= set(self.mesh.world.ranks):
            return function(*args, **kwargs)
        x = given.get("x")
        if x is None:
            self.meet(name, group)()
            return function(*args, **kwargs)
        if name == "recv":
            result = function(*args, **kwargs)
            self.note(x, {}, written=True)
            return result
        axes, complete = self.axes_of(group)
        before = self.kinds(x)
        self._allow(name, x, before, axes, complete, given.get("op", "sum"))
        compare = self.meet(
            name, group, x, given.get("op"), given.get("send_sizes"), given.get("receive_sizes")
        )
        waits = given.get("async_op")
        if not waits:
            compare()
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
        if waits:
            result.wait = partial(self._wait, compare, result.wait)
        kind = {
            "all_reduce": I,
            "broadcast": I,
            "reduce": V,
            "all_gather_into": I,
            "reduce_scatter_into": S,
        }.get(name, V)
        after = dict(before)
        for axis in axes:
            after[axis] = kind if complete or before.get(axis) == P else V
        self.note(given.get("out", x), after, written=True)
        return result

    def _wait(self, compare: Callable[[], None], wait: Callable[[], None]) -> None:
        compare()
        with torch._C.DisableTorchFunction():
            wait()

    def _allow(
        self, name: str, x: Tensor, kinds: Kinds, axes: Sequence[str], complete: bool, op: str
    ) -> None:
        """Check the type of what goes into a call."""
        for axis in axes if complete else ():
            kind = kinds.get(axis)
            sums = name in ("reduce", "reduce_scatter_into") or (
                name == "all_reduce" and op in ("sum", "avg")
            )
            if (
                sums
                and kind is not None
                and kind.letter in "IRSQ"
                and not (op == "avg" and kind.letter in "IR")
            ):
                what = "different shards" if kind.letter == "S" else "equal terms"
                self.wrong("sum", x, axis, f"is {kind}: {name} would add {what}")
            if name == "all_gather_into" and kind == P:
                self.wrong("sum", x, axis, "is P: its terms are gathered, not summed")

    def collective(
        self, function: Callable[..., Any], takes: str, gives: str, args: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Check a function of collectives.py: its input's type, that replicas are equal, and its gradient likewise."""
        bound = signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given, name = bound.arguments, function.__name__
        x, group = given["x"], given["group"]
        axes, complete = self.axes_of(group)
        if group.size == 1 or not complete:
            return function(*args, **kwargs)  # type: ignore[no-any-return]
        before = self.kinds(x)
        for axis in axes:
            kind = before.get(axis)
            if kind is not None and kind.letter not in takes:
                self.wrong("call", x, axis, f"is {kind}; {name} takes {' or '.join(takes)}")
        if takes == "I":
            self.meet(name, group, x, replica=True)()
        sizes = given.get("sizes")
        if sizes and sizes[group.rank] != x.shape[given["dim"]]:
            cut = f"{x.shape[given['dim']]} of dimension {given['dim']}, where its whole is cut into {list(sizes)}"
            self.wrong("meet", x, "+".join(axes), f"has {cut}")
        y: Tensor = function(*args, **kwargs)
        gives = "R" if given.get("gradient") == "partial" else gives
        dim = given.get("dim")
        cut_to = Kind("S", None if dim is None else dim if dim < 0 else dim - y.ndim)
        kinds = {**before, **dict.fromkeys(axes, cut_to if gives == "S" else Kind(gives))}
        self.note(y, kinds)
        if y.requires_grad:
            self._gradient_of(
                y, kinds, partial(self.meet, f"gradient of {name}", group) if gives == "I" else None
            )
        return y

    def applied(self, out: Any) -> None:
        """Follow the gradients of an autograd function's results, which its backward will get."""
        for y in out if isinstance(out, tuple) else (out,):
            if isinstance(y, Tensor) and y.requires_grad and not y.is_leaf and (kinds := self.kinds(y)):
                self._gradient_of(y, kinds)

    def _gradient_of(self, y: Tensor, kinds: Kinds, equal: Callable[..., Any] | None = None) -> None:
        duals, line = {axis: dual(kind) for axis, kind in kinds.items()}, line_of_user()

        def arrived(dy: Tensor) -> None:
            if hooks.active is self:
                self.note(dy, duals, line=f"the gradient of {line}")
                if equal:
                    equal(dy, replica=True)()

        y.register_hook(arrived)

    # ---- ranks meet

    def meet(
        self, name: str, group: Group, x: Tensor | None = None, *details: Any, replica: bool = False
    ) -> Callable[[], None]:
        """Post what this rank is about to do; return the function that compares it with the others of the group."""
        number = self.calls[group.ranks] = self.calls.get(group.ranks, 0) + 1
        axes, complete = self.axes_of(group)
        line, said = line_of_user(), {}
        if x is not None:
            said = {"shape": list(x.shape) if "gather" not in name else [x.numel()], "dtype": str(x.dtype)}
            if name == "all_to_all_into":
                said["shape"] = list(x.shape[1:])
                details = ()
            said["details"] = list(details)
        mine = {
            "call": name,
            "line": line,
            "said": said,
            "replica": fingerprint(x) if replica and x is not None else None,
            "epsilon": torch.finfo(x.dtype).eps if x is not None and x.is_floating_point() else 1e-9,
            "parameters": self._replicas(axes) if complete else {},
        }
        keys = [f"checked/{self.run}/{group.axis}/{group.ranks}/{number}/{r}" for r in range(group.size)]
        store, packed = _get_default_store(), json.dumps(mine)
        self.bytes += len(packed)
        store.set(keys[group.rank], packed)
        mine, tensor = json.loads(packed), "" if x is None else self.describe(x)
        return partial(self._compare, store, keys, mine, group, tensor, "+".join(axes))

    def _replicas(self, axes: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
        """Return fingerprints of the parameters used in this step that are the same along these axes."""
        found = {}
        for p, (sums, done) in self.used.items():
            replicated = axes and all(self.parameters[p][axis].letter in "IR" for axis in axes)
            if replicated and axes not in done and p in self.names:
                found[self.names[p]] = sums, torch.finfo(p.dtype).eps
                done.add(axes)
        return found

    def _compare(self, store: Any, keys: list[str], mine: Any, group: Group, tensor: str, axis: str) -> None:
        for r, key in enumerate(keys):
            try:
                store.wait([key], timedelta(seconds=self.timeout))
            except Exception:
                self.wrong(
                    "meet",
                    tensor or "nothing",
                    axis,
                    f"waits in {mine['call']}, but rank {group.ranks[r]} does not come",
                )
                return
            theirs = json.loads(store.get(key))
            other = f"rank {group.ranks[r]} at {theirs['line']}"
            for word in ("call", "said"):
                if theirs[word] != mine[word]:
                    self.wrong("meet", tensor, axis, f"is in {mine[word]}, but {other} is in {theirs[word]}")
            if mine["replica"] and unlike(mine["replica"], theirs["replica"], mine["epsilon"]):
                self.wrong(
                    "equal",
                    tensor,
                    axis,
                    f"is said to be replicated in {mine['call']}, but differs from that of {other}",
                )
            for name, (own, epsilon) in mine["parameters"].items():
                if name in theirs["parameters"] and unlike(own, theirs["parameters"][name][0], epsilon):
                    self.wrong(
                        "equal", name, axis, f"is replicated, but differs from that of rank {group.ranks[r]}"
                    )

    # ---- models and optimizers

    def entered(self, module: nn.Module, _: Any) -> None:
        """Learn the names of the parameters of a module that is called from outside."""
        for name, p in module.named_parameters():
            if p not in self.names:
                self.names[p] = name

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Check that all gradients are complete."""
        if hooks.active is not self:
            return
        for p in (p for given in optimizer.param_groups for p in given["params"] if p.grad is not None):
            lies = placement(p)
            for axis, kind in self.kinds(p.grad).items():
                replicated = axis not in lies and (axis != "pp" or hasattr(p, "tied"))
                if (replicated and kind != I) or kind == P:
                    self.wrong(
                        "step",
                        f"the gradient of {self.describe(p)}",
                        axis,
                        f"is {kind} when the optimizer steps",
                    )
        self.stepping = True

    def after_step(self, *_: Any) -> None:
        self.stepping = False
        self.used.clear()
        self.written = {key: entry for key, entry in self.written.items() if not entry[0].expired()}


def declare(x: Tensor, **kinds: str) -> Tensor:
    """Say how a tensor that nothing computed lies: declare(a_rD, dp="S"). Returns x; does nothing when not checking."""
    if hooks.active is not None:
        hooks.active.note(x, {**hooks.active.kinds(x), **{axis: Kind(kind) for axis, kind in kinds.items()}})
    return x


def own(x: Tensor) -> Tensor:
    """Say that a partial sum is used as this rank's own numbers from here on: P to V. Returns x."""
    if hooks.active is not None:
        kinds = hooks.active.kinds(x)
        hooks.active.note(x, {axis: V if kind == P else kind for axis, kind in kinds.items()})
    return x


@contextmanager
def checked(over: Mesh | Group, timeout: float = 30.0, rules: Sequence[str] = RULES) -> Iterator[Checker]:
    """Check all tensors and collectives inside the block. Raises Misplaced at the first violation.

    over: the mesh, or the group of its only axis. timeout: seconds that a rank waits for the others in a
    collective. rules: those to check. All ranks enter the block.
    """
    mesh = over if isinstance(over, Mesh) else Mesh(over, **{over.axis: over.size})
    checker, apply = Checker(mesh, timeout, rules), torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        out = apply(cls, *args, **kwargs)
        checker.applied(out)
        return out

    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:  # torch switches modes off inside of y.backward()
        with nullcontext() if checker in _get_current_function_mode_stack() else checker:
            return engine(*args, **kwargs)

    before, hooks.active = hooks.active, checker
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
    torch.autograd.Function.apply = classmethod(noted)  # type: ignore[assignment, method-assign]
    handles = [
        register_module_forward_pre_hook(checker.entered),
        register_optimizer_step_pre_hook(checker.before_step),
        register_optimizer_step_post_hook(checker.after_step),
    ]
    try:
        with checker:
            yield checker
    finally:
        hooks.active = before
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        for handle in (*handles, *checker.handles):
            handle.remove()


asked = False
"""True if --check was given."""


def if_asked(mesh: Mesh | None) -> AbstractContextManager[Checker | None]:
    """Return `checked(mesh)` if --check was given and there is more than one rank, else a block without effect."""
    return checked(mesh) if asked and mesh is not None and mesh.world.size > 1 else nullcontext()
