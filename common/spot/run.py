"""Run a page with its bug on every rank, and the right page on one device; measure what differs.

A page is a training run as lessons write it:

    MESH = dict(dp=2)                                  # its ranks on each axis

    def train(run: Run) -> Iterator[Tensor]:
        model = ...
        optimizer = run.optimizer(model)
        for t in range(run.steps):
            ...                                        # forward, backward, sums over ranks
            optimizer.step()
            yield loss                                 # of the global batch; gradients stay until the next step

On one device, a mesh of one rank, collectives return at once and the page is plain training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from common.comm import Group
from common.comm.mesh import Mesh
from common.errors import RankError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import (
    OPTIMIZERS,
    Difference,
    Followed,
    MakeOptimizer,
    Named,
    compare,
    largest,
    watch,
)
from common.spot.bugs import Bug

STEPS = 8
WAIT = 5.0  # seconds that a rank waits for another before the page counts as hanging
SEEN = 1e-6  # relative difference that counts as a symptom; right pages stay below 1e-12
LONGEST = 60.0  # the same for a page of which no wait is expected


@dataclass
class Run:
    """A training run: the mesh of ranks, the number of steps and the optimizer to make."""

    mesh: Mesh
    make_optimizer: MakeOptimizer
    steps: int
    owner: Named | None = field(default=None, init=False)

    def optimizer(self, owner: Named) -> torch.optim.Optimizer:
        """Return the run's optimizer of the parameters of `owner`, which gradients are compared by name with."""
        self.owner = owner
        return self.make_optimizer([p for _, p in owner.named_parameters()])


@dataclass(frozen=True)
class Symptoms:
    """Results of a page under one optimizer beside those of one device; the worst of all ranks."""

    differences: dict[str, Difference]
    """The largest difference of each of equality.KINDS."""
    by_name: list[dict[str, float]]
    """Of each step: name of a gradient -> its relative difference."""
    weights: dict[str, float]
    losses: tuple[list[float], list[float]]
    """Losses of all steps: one device, the page."""
    norms: tuple[list[float], list[float]]

    @property
    def kind(self) -> str:
        """The first of bugs.SYMPTOMS that the numbers show; "" if none does."""
        (loss, *_), (other, *_) = self.losses
        if abs(other - loss) > SEEN * abs(loss):
            return "loss"
        if max(self.by_name[0].values()) > SEEN:
            return "gradients"
        return "later" if max(d.value for d in self.differences.values()) > SEEN else ""


def load(text: str, path: Path) -> ModuleType:
    """Run a page's text as a module, whose tracebacks name the page."""
    module = ModuleType(f"page {path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def follow(page: ModuleType, mesh: Mesh, optimizer: str, steps: int = STEPS) -> Followed:
    """Train the page from the same random state; return what equality compares."""
    torch.manual_seed(0)
    run = Run(mesh, OPTIMIZERS[optimizer], steps)
    train: Callable[[Run], Iterator[Tensor]] = page.train
    return watch(train(run), run, mesh)


def _by_name(reference: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative difference of each tensor, infinite for one that is on one side only."""

    def of(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensors[name]} if name in tensors else {}

    return {name: largest(of(name, reference), of(name, other)).value for name in reference | other}


def compared(reference: Followed, other: Followed) -> Symptoms:
    """Return what differs between a run on one device and another."""
    pairs = zip(reference.gradients, other.gradients, strict=True)
    return Symptoms(
        compare(reference, other),
        [_by_name(a, b) for a, b in pairs],
        _by_name(reference.weights, other.weights),
        (reference.losses, other.losses),
        (reference.norms, other.norms),
    )


def visit(
    rt: Runtime,
    pages: list[tuple[str, str, Path]],
    steps: int = STEPS,
    optimizers: Iterable[str] = tuple(OPTIMIZERS),
) -> list[dict[str, Symptoms]]:
    """Return the symptoms of each page, by optimizer, on this rank. pages: (right text, text to run, path)."""
    torch.set_default_dtype(torch.float64)
    found, alone = [], Mesh(Group.alone())
    one_device: dict[tuple[Path, str], Followed] = {}
    for right, text, path in pages:
        page = load(text, path)
        mesh = Mesh(rt.world, **page.MESH)
        of_page = {}
        for optimizer in optimizers:
            if (path, optimizer) not in one_device:
                one_device[path, optimizer] = follow(load(right, path), alone, optimizer, steps)
            other = follow(page, mesh, optimizer, steps)
            of_page[optimizer] = compared(one_device[path, optimizer], other)
        found.append(of_page)
        mesh.close()
    return found


def worst_rank(ranks: list[dict[str, Symptoms]]) -> dict[str, Symptoms]:
    """Return the symptoms of the rank whose run differs most."""

    def size(found: dict[str, Symptoms]) -> float:
        return max(d.value for symptoms in found.values() for d in symptoms.differences.values())

    return max(ranks, key=size)


def world_size(bug: Bug) -> int:
    """Return the number of ranks of the bug's page."""
    mesh: dict[str, int] = load(bug.page, bug.path).MESH
    return int(torch.tensor(list(mesh.values())).prod())


def examine(bug: Bug) -> dict[str, Symptoms] | str:
    """Run the bug; return its symptoms by optimizer, or the watchdog's report if the ranks do not come to the end."""
    wait = WAIT if bug.symptom == "hang" else LONGEST
    try:
        ranks = spawn(visit, world_size(bug), [(bug.page, bug.text, bug.path)], timeout=wait, limit=3 * wait)
    except RankError as error:
        return str(error)
    return worst_rank([found for (found,) in ranks])
