"""Vocabulary of the files in `targets/`: what an exercise must do, and messages that point at a mistake.

    @target("every rank has the sum", ranks=(1, 2, 3))
    def the_sum(mine: Any, group: Group, rng: torch.Generator) -> None:
        x = torch.randn(group.size, 10, generator=rng, dtype=torch.float64)
        same("the result", mine.ring_all_reduce(x[group.rank], group), x.sum(0))

A target runs once for each number of ranks, on the first of them; `mine` is the exercise's module, and `rng` gives
the same numbers on every rank, others in every grading. A target that is missed raises Wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from common.comm.group import Group
from common.comm.ledger import Ledger, show_bytes
from common.comm.travel import Pending

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {  # SGD shows factors that AdamW hides
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
NEAR = 1e-12  # relative difference that another order of sums explains in float64; 1e-5 in float32

Check = Callable[[Any, Group, torch.Generator], None]
C = TypeVar("C", bound=Check)


class Wrong(Exception):
    """A target was missed; the message says where, with the number that was wrong."""


@dataclass(frozen=True)
class Target:
    """A claim about an exercise, the numbers of ranks to test it on, and the function that tests it."""

    name: str
    ranks: tuple[int, ...]
    check: Check


def target(name: str, ranks: tuple[int, ...] = (1,)) -> Callable[[C], C]:
    """Mark a function of a targets file as a target; targets are tried in the order of the file."""

    def mark(check: C) -> C:
        check.target = Target(name, ranks, check)  # type: ignore[attr-defined]
        return check

    return mark


def near(dtype: torch.dtype) -> float:
    """Return the relative difference that is allowed for a type."""
    return NEAR if dtype in (torch.float64, torch.complex128) else 1e-5


def same(
    name: str,
    got: object,
    want: Tensor,
    looks_like: Mapping[str, Tensor] | None = None,
    tolerance: float | None = None,
) -> None:
    """Compare a tensor with the right one. Raises Wrong, which names the first wrong element.

    looks_like: tensors of typical mistakes by their names; the message says which one was found.
    tolerance: relative to the largest element; default: rounding of the type.
    """
    if not isinstance(got, Tensor):
        raise Wrong(f"{name} is {_kind(got)}, a tensor of shape {tuple(want.shape)} is needed")
    if got.shape != want.shape:
        raise Wrong(f"{name} has shape {tuple(got.shape)}, {tuple(want.shape)} is needed")
    if got.dtype != want.dtype:
        raise Wrong(f"{name} has type {got.dtype}, {want.dtype} is needed")
    got, want = got.detach(), want.detach()
    if not want.numel() or _close(got, want, tolerance):
        return
    if not got.isfinite().all():
        raise Wrong(f"{name} has {int((~got.isfinite()).sum())} elements that are not finite")
    for mistake, tensor in (looks_like or {}).items():
        if tensor.shape == got.shape and _close(got, tensor.to(got.dtype), tolerance):
            raise Wrong(f"{name} is {mistake}")
    if not got.any():
        raise Wrong(f"{name} is zero everywhere")
    if want.numel() == 1:
        raise Wrong(f"{name} is {got.item():.9g}, {want.item():.9g} is right")
    factor = (got * want).sum() / (want * want).sum()
    if _close(got, factor * want, tolerance):
        raise Wrong(f"{name} is {factor:.6g} times the right one, in every element")
    scale = want.abs().max().item() or 1.0
    off = (got - want).abs() > (tolerance or near(want.dtype)) * scale
    place = tuple(off.nonzero()[0].tolist())
    raise Wrong(
        f"{name} is wrong in {int(off.sum())} of {off.numel()} elements; the first, {list(place)}, "
        f"is {got[place].item():.6g}, {want[place].item():.6g} is right"
    )


def _close(got: Tensor, want: Tensor, tolerance: float | None) -> bool:
    difference = (got - want).abs().max().item()
    return difference <= (tolerance or near(want.dtype)) * max(want.abs().max().item(), 1e-300)


def unchanged(name: str, now: Tensor, before: Tensor) -> None:
    """Raise Wrong if a tensor that an answer was given is not what it was."""
    if not torch.equal(now.detach(), before.detach()):
        raise Wrong(f"{name} is changed in place; put the result into a new tensor")


def _kind(x: object) -> str:
    return "None" if x is None else f"a {type(x).__name__}"


def same_gradients(
    got: Iterable[tuple[str, Tensor]],
    want: Iterable[tuple[str, Tensor]],
    looks_like: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Compare the gradients of two sets of named parameters. Raises Wrong, which names the first wrong one.

    looks_like: the gradients of typical mistakes, by the mistake's name, then by the parameter's.
    """
    right = dict(want)
    for name, p in got:
        mine, theirs = p.grad, right[name].grad
        if theirs is None:
            if mine is not None:
                raise Wrong(f"the gradient of {name} is a tensor; nothing used {name}, so it must stay None")
            continue
        mistakes = {m: of[name] for m, of in (looks_like or {}).items() if name in of}
        same(f"the gradient of {name}", mine, theirs, mistakes)


def backpropagate(name: str, y: object, dy: Tensor) -> None:
    """Run the backward pass of y from its gradient dy. Raises Wrong if y is cut off from what it was computed from."""
    if not isinstance(y, Tensor) or not y.requires_grad:
        raise Wrong(
            f"{name} has no backward pass: it is a constant for autograd (detached, or under no_grad)"
        )
    y.backward(dy)


def exactly(name: str, got: Fraction | float, want: Fraction | float) -> None:
    """Compare a count. Raises Wrong."""
    if got != want:
        raise Wrong(f"{name}: {_number(got)}, exactly {_number(want)} is needed")


def at_most(name: str, got: Fraction | float, most: Fraction | float) -> None:
    """Compare a count with its limit. Raises Wrong."""
    if got > most:
        raise Wrong(f"{name}: {_number(got)}, at most {_number(most)} is allowed")


def _number(x: Fraction | float) -> str:
    return show_bytes(x) if isinstance(x, int | Fraction) else f"{x:.6g}"


def holds(condition: bool, otherwise: str) -> None:
    """Raise Wrong with the message `otherwise` unless the condition holds."""
    if not condition:
        raise Wrong(otherwise)


def share(times: int, size: int, group: Group) -> Fraction:
    """Return times * (n-1)/n of `size` bytes: a gather or a reduce-scatter sends 1 of these, an all-reduce 2."""
    return Fraction(times * (group.size - 1) * size, group.size)


@contextmanager
def traced(note: Callable[[str, str], object]) -> Iterator[None]:
    """Call note("start", call) and note("wait", call) as communication inside the block starts and is waited for."""
    start, wait = Pending.start, Pending.wait

    def starting(pending: Pending, *given: Any, **named: Any) -> Pending:
        note("start", pending.op)
        return start(pending, *given, **named)

    def waiting(pending: Pending) -> None:
        note("wait", pending.op)
        wait(pending)

    with patch.multiple(Pending, start=starting, wait=waiting):
        yield


@contextmanager
def counted(*calls: str) -> Iterator[Ledger]:
    """Count the communication inside the block. Raises Wrong for a call of `common.comm` that is not in `calls`."""
    with Ledger() as ledger:
        yield ledger
    if other := sorted({row.op for row in ledger.rows} - set(calls)):
        allowed = f"write it with {', '.join(calls)}" if calls else "it needs no communication"
        raise Wrong(f"it calls comm.{other[0]}; {allowed}")
