"""A part of a model in several languages behind one interface, against one device and against one another.

InTorch     what autograd goes through: a module, or functions of C++ on LibTorch
InNumpy     a layer of a module in plain C++, on numpy arrays, with its own backward pass

What tp_languages.py and ep_languages.py share; `prove` and `check_modules` also serve pp_languages.py.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Protocol, cast

import torch
from rich.table import Table
from torch import Tensor

from common.comm import sizes_of
from common.comparison import report
from common.equality import (
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
from common.errors import UsageError
from common.ledger import Ledger
from common.lesson import DTYPES, console
from common.measure import BenchmarkRecord
from common.mesh import Mesh
from common.placement import Shard, gradient_norm, place
from common.proof import Proof
from common.runtime import Runtime
from common.training import TrainingOptions


class Part(Protocol):
    """A layer of some language. Its pieces have the names of the plain layer's parameters."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        """y_BSD."""

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """dx_BSD; leaves new gradients."""

    def update(self) -> None:
        """A step of the optimizer."""

    def pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Parameter and gradient by name, as they lie on this rank."""

    def sent(self) -> Fraction:
        """Bytes this rank sent since it was asked last."""


class InTorch:
    """A layer that autograd goes through. finish: what follows the backward pass."""

    def __init__(
        self,
        call: Callable[[Tensor], Tensor],
        named: Mapping[str, Tensor],
        optimizer: str,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.call, self.named, self.finish, self.bytes = call, named, finish, Fraction(0)
        self.optimizer = OPTIMIZERS[optimizer](list(named.values()))

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """By name."""
        return self.named.items()

    def forward(self, x_BSD: Tensor) -> Tensor:
        """y_BSD."""
        self.x = x_BSD.clone().requires_grad_()
        with Ledger() as ledger:
            self.y = self.call(self.x)
        self.bytes += ledger.bytes()
        return self.y.detach()

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """dx_BSD."""
        self.optimizer.zero_grad()
        with Ledger() as ledger:
            self.y.backward(dy_BSD)
            self.finish()
        self.bytes += ledger.bytes()
        return cast(Tensor, self.x.grad)

    def update(self) -> None:
        """A step."""
        self.optimizer.step()

    def pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name."""
        return {name: (p.detach(), cast(Tensor, p.grad)) for name, p in self.named.items()}

    def sent(self) -> Fraction:
        """Bytes."""
        counted, self.bytes = self.bytes, Fraction(0)
        return counted


class InLibTorch(InTorch):
    """The same on the `Ranks` of a C++ module, which counts its messages; it counts them times the ranks."""

    def __init__(self, ranks: Any, *arguments: Any) -> None:
        self.ranks = ranks
        super().__init__(*arguments)

    def sent(self) -> Fraction:
        """Bytes."""
        return Fraction(sum(n_bytes for _, n_bytes, _ in self.ranks.take_messages()), self.ranks.size)


class InNumpy:
    """A layer of a module in plain C++."""

    def __init__(self, layer: Any, whole: Mapping[str, Tensor], optimizer: str) -> None:
        self.layer, self.optimizer, self.bytes = layer, optimizer, 0
        self.layer.set_weights({name: p.detach().numpy() for name, p in whole.items()})

    def forward(self, x_BSD: Tensor) -> Tensor:
        """y_BSD."""
        return torch.from_numpy(self.layer.forward(x_BSD.numpy()))

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """dx_BSD."""
        dx = torch.from_numpy(self.layer.backward(dy_BSD.numpy()))
        self.bytes += self.layer.bytes_sent
        return dx

    def update(self) -> None:
        """A step, with the numbers of OPTIMIZERS."""
        if self.optimizer == "sgd":
            self.layer.sgd(0.1)
        else:
            self.layer.adamw(1e-3, epsilon=1e-5)

    def pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name."""
        weights, gradients = self.layer.weights(), self.layer.gradients()
        return {
            name: (torch.from_numpy(weights[name]), torch.from_numpy(gradients[name])) for name in weights
        }

    def sent(self) -> Fraction:
        """Bytes."""
        counted, self.bytes = self.bytes, 0
        return Fraction(counted)


def follow(
    part: Part,
    plain: Mapping[str, Tensor],
    mesh: Mesh,
    axis: str,
    steps: int,
    step: Callable[[Part], tuple[float, Tensor]],
) -> tuple[Followed, Fraction]:
    """What the steps leave, gathered, and the bytes this rank sent.

    step: (loss, the whole dx) of a forward and backward pass. plain: the parameters of the plain layer.
    """
    found, sent = Followed(), Fraction(0)

    def lying(name: str, value: Tensor) -> Tensor:
        """The piece, and how it lies: along the dimension in which it is shorter than the plain parameter."""
        cut = [dim for dim in range(value.ndim) if value.shape[dim] != plain[name].shape[dim]]
        value = value.clone()
        if cut:
            place(value, axis, Shard(cut[0], tuple(sizes_of(plain[name].shape[cut[0]], mesh.shape[axis]))))
        return value

    for _ in range(steps):
        loss, dx = step(part)
        sent += part.sent()
        pieces = {name: (lying(name, p), g) for name, (p, g) in part.pieces().items()}
        for p, g in pieces.values():
            p.grad = g
        found.losses.append(loss)
        found.gradients.append({name: whole(g, p, mesh) for name, (p, g) in pieces.items()} | {"dx": dx})
        found.norms.append(gradient_norm((p for p, _ in pieces.values()), mesh).item())
        part.update()
    found.weights = {name: whole(p, lying(name, p), mesh) for name, (p, _) in part.pieces().items()}
    return found, sent


def prove(
    rt: Runtime,
    o: TrainingOptions,
    mesh: Mesh,
    train: Callable[[str, str, Start], tuple[Followed, Fraction, Fraction]],
    benchmark: Callable[[TrainingOptions], list[BenchmarkRecord]],
    title: str,
) -> bool:
    """Every version against one device, and against every other.

    train: of a version and an optimizer what the steps left, the bytes sent and those by formula; first it is asked for
    "one device", whose parameters pass through the third argument.
    """
    proof = Proof(DTYPES[o.dtype])
    table = Table(title="largest relative difference between two versions", title_justify="left")
    for column in ("versions", "", "optimizer", "difference"):
        table.add_column(column, justify="right" if column == "difference" else "left")
    largest = 0.0
    for optimizer in OPTIMIZERS:
        reference = with_units(lambda start: train("one device", optimizer, start)[0])  # noqa: B023
        runs = {name: train(name, optimizer, unmoved) for name in o.versions}
        for name, (found, sent, formula) in runs.items():
            proof.add(name, optimizer, reference, found, mesh, sent, formula)
        for a, b in itertools.combinations(o.versions, 2):
            kinds = worst_of_world(compare(runs[a][0], runs[b][0]), mesh).values()
            value = max(d.value for d in kinds)
            table.add_row(a, b, optimizer, f"{value:.1e}")
            largest = max(largest, value)
    proof.gather(rt.world)
    out, limit = console(rt), 100 * TOLERANCE[DTYPES[o.dtype]]
    out.print(proof.tables(title), table)
    proof.agree = largest <= limit
    records = benchmark(replace(o, steps=5))
    report(rt, o, proof.recorded(records, dict.fromkeys(o.versions)))
    out.print(proof.sentence())
    agree = "agree with one another within" if proof.agree else "do NOT agree with one another within"
    out.print(f"the languages {agree} {limit:.0e}")
    return proof.holds


def check_modules(rt: Runtime, lesson: str, modules: Iterable[str]) -> None:
    """Give every library of this rank one thread. Raises UsageError where these C++ modules cannot run."""
    modules = list(modules)
    mpi = [name for name in modules if name.endswith("_mpi")]
    if mpi and rt.world_size > 1 and rt.launcher not in ("openmpi", "mpich", "slurm"):
        how = f"mpirun -np {rt.world_size} python {lesson}"
        raise UsageError(f"{mpi[0]} needs MPI between its {rt.world_size} ranks; start them with {how}")
    if mpi and rt.device.type != "cpu":
        raise UsageError(f"{mpi[0]} computes on CPUs: give --device cpu")
    try:
        for name in ("fived", *modules):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"the Python module {error.name} is not built; run make setup") from None
    torch.set_num_threads(1)
    importlib.import_module("fived").blas.set_threads(1)
