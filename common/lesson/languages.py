"""Comparison of one part of a model in several languages, with one device and with one another.

InTorch     a layer in autograd: a module, or functions of C++ on LibTorch
InNumpy     a layer of a module in plain C++, on numpy arrays, with its own backward pass

Used by tp_languages.py and ep_languages.py; dp_languages.py and pp_languages.py use `prove_languages` and
`check_modules`.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor

from common import random
from common.comm import sizes_of
from common.comm.ledger import Ledger, record
from common.comm.mesh import Mesh
from common.comm.placement import Shard, gradient_norm, place
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.comparison import report
from common.lesson.equality import (
    OPTIMIZERS,
    TOLERANCE,
    Followed,
    Start,
    compare,
    unmoved,
    whole,
    with_units,
    worst_of_world,
)
from common.lesson.measure import BenchmarkRecord
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console
from common.lesson.training import TrainingOptions


class InTorch:
    """A layer in autograd. finish: called after the backward pass."""

    def __init__(
        self,
        call: Callable[[Tensor], Tensor],
        named: Mapping[str, Tensor],
        optimizer: str,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.call, self.named, self.finish = call, named, finish
        self.optimizer = OPTIMIZERS[optimizer](list(named.values()))

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Return the parameters by name."""
        return self.named.items()

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return y_BSD."""
        self.x = x_BSD.clone().requires_grad_()
        self.y = self.call(self.x)
        return self.y.detach()

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """Return dx_BSD; store new gradients."""
        self.optimizer.zero_grad()
        self.y.backward(dy_BSD)
        self.finish()
        return cast(Tensor, self.x.grad)

    def update(self) -> None:
        """Take a step of the optimizer."""
        self.optimizer.step()

    def pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return this rank's parameters and gradients by name."""
        return {name: (p.detach(), cast(Tensor, p.grad)) for name, p in self.named.items()}


class InLibTorch(InTorch):
    """InTorch on the `Ranks` of a C++ module, which reports this rank's bytes times the number of ranks."""

    def __init__(self, ranks: Any, *arguments: Any) -> None:
        self.ranks = ranks
        super().__init__(*arguments)

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """Return dx_BSD; store new gradients, and tell the ledger of both passes' messages."""
        dx_BSD = super().backward(dy_BSD)
        for operation, n_bytes, seconds in self.ranks.take_messages():
            record(operation, "C++", Fraction(n_bytes, self.ranks.size), seconds)
        return dx_BSD


class InNumpy:
    """A layer of a module in plain C++."""

    def __init__(self, layer: Any, whole: Mapping[str, Tensor], optimizer: str) -> None:
        self.layer, self.optimizer = layer, optimizer
        self.layer.set_weights({name: p.detach().numpy() for name, p in whole.items()})

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return y_BSD."""
        return torch.from_numpy(self.layer.forward(x_BSD.numpy()))

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """Return dx_BSD; store new gradients, and tell the ledger of both passes' bytes."""
        dx = torch.from_numpy(self.layer.backward(dy_BSD.numpy()))
        record("all", "C++", self.layer.bytes_sent, 0.0)
        return dx

    def update(self) -> None:
        """Take a step of the optimizer, with the numbers of OPTIMIZERS."""
        if self.optimizer == "sgd":
            self.layer.sgd(0.1)
        else:
            self.layer.adamw(1e-3, epsilon=1e-5)

    def pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return this rank's parameters and gradients by name."""
        weights, gradients = self.layer.weights(), self.layer.gradients()
        return {
            name: (torch.from_numpy(weights[name]), torch.from_numpy(gradients[name])) for name in weights
        }


Part = InTorch | InNumpy
"""A layer in some language. Its pieces have the names of the plain layer's parameters."""


def samples(o: TrainingOptions) -> tuple[Tensor, Tensor]:
    """Return (x_BSD, its target y_BSD): normal numbers that depend on the seed alone."""
    shape = (o.batch, o.sequence, o.model_config().width)
    made = (random.normals(o.seed, random.stream_of(name), math.prod(shape)).reshape(shape) for name in "xy")
    x, y = (torch.from_numpy(values).to(DTYPES[o.dtype]) for values in made)
    return x, y


def watch_layer(
    part: Part,
    plain: Mapping[str, Tensor],
    mesh: Mesh,
    axis: str,
    steps: int,
    step: Callable[[Part], tuple[float, Tensor]],
) -> tuple[Followed, Fraction]:
    """Take the steps; return losses, gradients, norms and weights, gathered, and the bytes this rank sent.

    step: returns (loss, the whole dx) of a forward and backward pass. plain: the parameters of the plain
    layer.
    """
    found, sent = Followed(), Fraction(0)

    def lying(name: str, value: Tensor) -> Tensor:
        """Return a copy of the piece, placed along the dimension in which the whole is longer."""
        cut = [dim for dim in range(value.ndim) if value.shape[dim] != plain[name].shape[dim]]
        value = value.clone()
        if cut:
            place(value, axis, Shard(cut[0], tuple(sizes_of(plain[name].shape[cut[0]], mesh.shape[axis]))))
        return value

    for _ in range(steps):
        with Ledger() as ledger:
            loss, dx = step(part)
        sent += ledger.bytes()
        pieces = {name: (lying(name, p), g) for name, (p, g) in part.pieces().items()}
        for p, g in pieces.values():
            p.grad = g
        found.losses.append(loss)
        found.gradients.append({name: whole(g, p, mesh) for name, (p, g) in pieces.items()} | {"dx": dx})
        found.norms.append(gradient_norm((p for p, _ in pieces.values()), mesh).item())
        part.update()
    found.weights = {name: whole(p, lying(name, p), mesh) for name, (p, _) in part.pieces().items()}
    return found, sent


def prove_languages(
    rt: Runtime,
    o: TrainingOptions,
    mesh: Mesh,
    train: Callable[[str, str, Start], tuple[Followed, Fraction | None, Fraction]],
    benchmark: Callable[[TrainingOptions], list[BenchmarkRecord]],
    title: str,
) -> bool:
    """Compare every version with one device and with every other version; return True if the proof holds.

    train: of a version and an optimizer returns the results of the steps, the bytes sent, None if they cannot
    be counted, and those by formula. Its version "one device" passes its parameters through the third argument.
    """
    proof, runs = Proof(mesh, DTYPES[o.dtype]), dict[str, dict[str, Followed]]()
    for optimizer in OPTIMIZERS:
        reference, runs[optimizer] = with_units(lambda start: train("one device", optimizer, start)[0]), {}  # noqa: B023
        for name in o.versions:
            found, sent, formula = train(name, optimizer, unmoved)
            proof.add(name, optimizer, reference, found, sent, formula)
            runs[optimizer][name] = found
    heads = ("versions", "", *(f">{optimizer}" for optimizer in OPTIMIZERS))
    table = make_table("largest relative difference between two versions", heads)
    largest = 0.0
    for a, b in itertools.combinations(o.versions, 2):
        pairs = [worst_of_world(compare(of[a], of[b]), mesh).values() for of in runs.values()]
        values = [max(d.value for d in kinds) for kinds in pairs]
        table.add_row(a, b, *(f"{value:.1e}" for value in values))
        largest = max(largest, *values)
    proof.gather(rt.world)
    out, limit = console(rt), 100 * TOLERANCE[DTYPES[o.dtype]]
    out.print(proof.tables(title), table)
    proof.agree = largest <= limit
    records = benchmark(replace(o, steps=5))
    report(rt, o, proof.recorded(records, dict.fromkeys(o.versions)))
    out.print(proof.sentence())
    agree = "agree with one another within" if proof.agree else "do NOT agree with one another within"
    out.print(f"the versions {agree} {limit:.0e}")
    return proof.holds


def check_modules(rt: Runtime, lesson: str, modules: Iterable[str]) -> None:
    """Give every library of this rank one thread. Raises UsageError if these C++ modules cannot run."""
    modules = list(modules)
    mpi = [name for name in modules if name.endswith("_mpi")]
    how = f"mpirun -np {rt.world_size} python {lesson}"
    if mpi and rt.world_size > 1 and rt.launcher not in ("openmpi", "mpich", "slurm"):
        raise UsageError(f"{mpi[0]} needs MPI between its {rt.world_size} ranks; start them with {how}")
    if mpi and rt.device.type != "cpu":
        raise UsageError(f"{mpi[0]} computes on CPUs: give --device cpu")
    try:
        for name in ("fived", *modules):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"the Python module {error.name} is not built; run make setup") from None
    if mpi and (seen := importlib.import_module("mpi4py.MPI").COMM_WORLD.size) != rt.world_size:
        raise UsageError(
            f"mpi4py sees {seen} rank(s), the launcher {rt.launcher} started {rt.world_size}; "
            f"start them with the mpirun of the MPI that mpi4py was built for: {how}"
        )
    torch.set_num_threads(1)
    importlib.import_module("fived").blas.set_threads(1)
