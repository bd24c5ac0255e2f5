"""A model file of one's own, trained on a mesh and on one device.

    python -m common.grade --mine model.py --mesh "tp=2 dp=2"

The file has four functions; the model and its training are any PyTorch:

    make_model() -> nn.Module            the plain model, with the same weights at each call
    batch(step) -> tuple[Tensor, ...]    the global batch of a step, the same on every rank
    parallelize(model, mesh) -> None     the strategies, in place; `place` of common.comm.placement says what is split
    step(model, batch, mesh) -> Tensor   forward and backward of this rank's part; leaves the gradients of the global
                                         batch and returns its loss

On one device `parallelize` is not called, and the mesh has one rank. Loss, every gradient, the gradient norm and the
weights after SGD and after AdamW must be equal.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, blocked_in
from common.comm.mesh import AXES, Mesh
from common.errors import UsageError
from common.grade.targets import Wrong, same
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import (
    OPTIMIZERS,
    TOLERANCE,
    Followed,
    MakeOptimizer,
    Named,
    compare,
    unequal_replicas,
    watch,
)

FUNCTIONS = {
    "make_model": (),
    "batch": ("step",),
    "parallelize": ("model", "mesh"),
    "step": ("model", "batch", "mesh"),
}
STEPS = 3
Set = tuple[str, str, dict[str, Tensor]]  # kind, suffix of the names, tensors: as Followed.sets returns them


@dataclass
class OwnRun:
    """A training run of the file's model; `owner` is what the optimizer steps on."""

    owner: Named | None


def parse_mesh(text: str) -> dict[str, int]:
    """Return the ranks along each axis of "tp=2 dp=2". Raises UsageError."""
    shape: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        axis, _, ranks = word.partition("=")
        if axis not in AXES or not ranks.isdecimal() or not 1 <= int(ranks) <= 64:
            raise UsageError(
                f'--mesh {text!r}: give axes and ranks like "tp=2 dp=2"; the axes are {", ".join(AXES)}'
            )
        shape[axis] = int(ranks)
    return shape


def load_mine(path: Path) -> Any:
    """Return the file as a module. Raises UsageError if it is not there, does not run or lacks a function."""
    if not path.is_file():
        raise UsageError(f"--mine {path}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--mine {path}: give a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--mine {path}: {_raised(error, path)}") from error
    for name, takes in FUNCTIONS.items():
        needed = f"{name}({', '.join(takes)})"
        if not callable(getattr(module, name, None)):
            raise UsageError(f"--mine {path} has no function {needed}; it needs {', '.join(FUNCTIONS)}")
        try:
            inspect.signature(getattr(module, name)).bind(*takes)
        except TypeError as error:
            raise UsageError(f"--mine {path}: {name} must take ({', '.join(takes)}), but {error}") from None
    return module


def _raised(error: Exception, path: Path) -> str:
    """Return what an exception says, with the line of the file that led to it."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"line {error.lineno} is no Python: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = f" in line {frames[-1].lineno}, `{frames[-1].line}`" if frames else ""
    return f"it raised {type(error).__name__}{line}: {next(iter(str(error).splitlines()), '')}"


def _call(mine: Any, name: str, *given: object) -> Any:
    """Call a function of the file. Raises UsageError with its line if it raises, but for a wait that failed."""
    try:
        return getattr(mine, name)(*given)
    except Exception as error:
        if blocked_in:  # the watchdog asks all ranks where they stand
            raise
        step = f"({given[0]})" if name == "batch" else ""
        raise UsageError(f"{name}{step} of {mine.__file__}: {_raised(error, Path(mine.__file__))}") from error


def _train(mine: Any, mesh: Mesh, make: MakeOptimizer, split: bool) -> Followed:
    """Train `STEPS` steps; return losses, gradients, norms and weights."""
    torch.manual_seed(0)
    model = _call(mine, "make_model")
    if split:
        _call(mine, "parallelize", model, mesh)
    optimizer = make(list(model.parameters()))

    def steps() -> Iterator[Tensor]:
        for t in range(STEPS):
            optimizer.zero_grad()
            yield torch.as_tensor(_call(mine, "step", model, _call(mine, "batch", t), mesh)).detach()
            optimizer.step()

    found = watch(steps(), OwnRun(model), mesh if split else None)
    if split and (names := unequal_replicas(model.named_parameters(), mesh)):
        raise Wrong(
            f"after {STEPS} steps the ranks that hold {names[0]} differ: its gradient was not summed over them"
        )
    return found


def _first_loss(pair: tuple[Set, Set]) -> list[tuple[Set, Set]]:
    """Return the losses of step 0 alone: those of later steps follow from wrong gradients."""
    (kind, suffix, right), (*_, got) = pair
    first = next(iter(right))
    return [((kind, suffix, {first: right[first]}), (kind, suffix, got))]


def explain(reference: Followed, found: Followed) -> str:
    """Return the first number that differs from one device; empty if all are equal."""
    largest = {
        kind: d for kind, d in compare(reference, found).items() if not d.value <= TOLERANCE[torch.float64]
    }
    if not largest:
        return ""
    pairs = list(zip(reference.sets(), found.sets(), strict=True))
    for (kind, suffix, right), (*_, got) in (*_first_loss(pairs[0]), *pairs[1:], pairs[0]):
        for name, tensor in right.items():
            try:
                if name not in got:
                    raise Wrong(f"{name}{suffix} is missing")
                same(f"{name}{suffix}", got[name], tensor, tolerance=1e-9)
            except Wrong as wrong:
                return f"{'the gradient of ' if kind == 'gradients' else ''}{wrong}"
    kind, difference = next(iter(largest.items()))
    return f"the {kind} differ by {difference.value:.1e} in {difference.where}"


def _on_ranks(rt: Runtime, path: Path, shape: dict[str, int]) -> dict[str, str]:
    """Return what differs, by optimizer."""
    mine, mesh, found = load_mine(path), Mesh(rt.world, **shape, timeout=rt.timeout), {}
    for name, make in OPTIMIZERS.items():
        reference = _train(mine, Mesh(Group.alone("world")), make, False)
        try:
            found[name] = explain(reference, _train(mine, mesh, make, True))
        except Wrong as wrong:
            found[name] = str(wrong)
    return found


def grade_mine(path: Path, mesh: str) -> dict[str, str]:
    """Return what differs from one device by optimizer, empty where nothing does.

    Raises UsageError if the file does not fit, RankError if a function of it raises or ranks wait for one another.

    path: the model file. mesh: ranks along the axes, "tp=2 dp=2".
    """
    shape = parse_mesh(mesh)
    load_mine(path)
    ranks = math.prod(shape.values())
    found: list[dict[str, str]] = spawn(_on_ranks, ranks, path.absolute(), shape, limit=None)
    return {name: next((of[name] for of in found if of[name]), "") for name in OPTIMIZERS}
