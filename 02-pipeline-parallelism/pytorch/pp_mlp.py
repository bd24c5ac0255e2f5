"""The MLP of chapter 01 as a pipeline, in Python and in C++: the executor runs any model.

    first stage             a stage                        last stage
    linear ── x_BH ──▶ gelu, linear, ... ── x_BH ──▶ gelu, linear ──▶ loss      x_BH is the sum before the GELU

In Python a stage is any function of the previous stage's output: here some of the MLP's layers. pp_mpi reads
the same instruction list and has its own backward pass. Cost: B·H numbers for each side on which a stage has
a neighbour on another rank. Both versions also sum the loss and the norm over ranks; pp_mpi does so inside
MPI, uncounted.

pp_languages.py runs both versions.   B batch  I inputs  H width  n ranks
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group, ledger
from common.comm.mesh import Mesh
from common.data.text import mlp_batch
from common.launch.command_line import Width, Within
from common.launch.runtime import Runtime
from common.lesson.equality import Followed
from common.lesson.job import Job
from common.lesson.runner import DTYPES
from common.lesson.training import Batches
from common.models.mlp import MLP, sizes
from common.models.transformer import cross_entropy_sum

from pp_deferred import Deferred
from pp_executor import Executor
from pp_schedule import Schedule
from pp_schedules import make_schedule
from pp_stages import evenly
from pp_training import PipelineOptions


@dataclass
class MLPOptions(PipelineOptions):
    """Options: the schedule, and the shape of the MLP."""

    schedule: str = "zb-h1"
    """Name of the schedule, the same in Python and in C++."""
    context: Width = 16
    """Number of bytes that the MLP reads."""
    hidden: Width = 64
    """Width of the MLP's hidden layers."""
    layers: Annotated[int, Within(1, 1000)] = 16
    """Number of the MLP's linear layers."""


class Samples(Batches):
    """Batches of the MLP: all samples on every rank."""

    options: MLPOptions

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """Return (x_BI, y_B) of each micro-batch."""
        o = self.options
        return [
            mlp_batch(self.text.train, o.seed, step, o.batch, o.context, lo, hi, DTYPES[o.dtype])
            for lo, hi in self.samples()
        ]


class Named:
    """Parameters under their names, with a module's interface."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        self.named = named

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Return the pairs (name, parameter), as a module does."""
        return self.named.items()


def plain_mlp(o: MLPOptions) -> MLP:
    """Return the whole MLP."""
    return MLP(sizes(o.context, o.hidden, o.layers), o.seed, DTYPES[o.dtype])


def mlp_stage(model: MLP, layers: range, x_BI: Tensor, positions: Tensor) -> Tensor:
    """Run some layers of the MLP, with the GELU before each but the first of all.

    A stage returns the sum before the next GELU.
    """
    for i in layers:
        x_BI = model.layers[i](x_BI if i == 0 else nn.functional.gelu(x_BI, approximate="tanh"))
    return x_BI


def mlp_in_stages(model: MLP, mesh: Mesh, schedule: Schedule, o: MLPOptions) -> tuple[Executor, Named]:
    """Return the executor of this rank's stages, and their parameters."""
    cuts, deferred, mine = evenly(o.layers, schedule.stages), Deferred(), schedule.mine(mesh.at["pp"])
    if any(i.op == "W" for i in schedule.lists[mesh.at["pp"]]):
        deferred.replace(model)
    stages: dict[int, Any] = {s: partial(mlp_stage, model, cuts[s]) for s in mine}
    kept = tuple(f"layers.{i}." for s in mine for i in cuts[s])
    owner = Named({name: p for name, p in model.named_parameters() if name.startswith(kept)})
    executor = Executor(
        schedule,
        stages,
        mesh,
        cross_entropy_sum,
        lambda x_BI: (len(x_BI), o.hidden),
        DTYPES[o.dtype],
        deferred,
    )
    return executor, owner


def train(job: Job[MLPOptions]) -> Iterator[Tensor]:
    """Train the MLP by --schedule; yield the loss of each batch."""
    o, model = job.options, cast(MLP, job.model)
    schedule = make_schedule(o.schedule, job.group.size, o.micro_batches, o.chunks)
    executor, owner = mlp_in_stages(model, job.mesh, schedule, o)
    optimizer = job.optimizer(owner)  # of this rank's layers
    for batch in job.batches():  # the same on all ranks
        count = batch.count_targets()
        optimizer.zero_grad()
        loss_sum = executor.run(batch.parts, 1 / count, batch.begin)  # forward and backward
        optimizer.step()
        yield loss_sum / count


class InMPI:
    """MLP under pp_mpi, with the optimizers of pp_mpi."""

    def __init__(self, rt: Runtime, o: MLPOptions, optimizer: str) -> None:
        from mpi4py import MPI

        import pp_mpi

        schedule = make_schedule(o.schedule, rt.world_size, o.micro_batches, o.chunks)
        shape = sizes(o.context, o.hidden, o.layers)
        self.model = pp_mpi.MLP(shape, str(schedule), MPI.COMM_WORLD, o.dtype, o.seed)
        self.optimizer, self.batches = optimizer, Samples(o, Group.alone(), rt.device)
        self.cut: dict[int, tuple[Any, Any]] = {}

    def backward(self, t: int) -> float:
        """Compute the gradients of step t; return the loss."""
        if t not in self.cut:
            x, y = (torch.cat(pieces) for pieces in zip(*self.batches.parts(t), strict=True))
            self.cut[t] = x.numpy(), y.to(torch.uint8).numpy()
        loss: float = self.model.loss_and_gradients(*self.cut[t])
        ledger.record("send", "pp", self.model.bytes_sent, self.model.blocked_seconds)
        return loss

    def update(self) -> None:
        """Run a step of the optimizer, with the hyperparameters of OPTIMIZERS."""
        if self.optimizer == "sgd":
            self.model.sgd(0.1)
        else:
            self.model.adamw(1e-3, epsilon=1e-5)

    def follow(self, steps: int, mesh: Mesh) -> Followed:
        """Train `steps` steps; return the same record as common.lesson.equality.watch does for a model in torch."""
        found = Followed()

        def gathered(values: dict[str, Any]) -> dict[str, Tensor]:
            parts = comm.everyones(values, mesh.group("pp"))
            return {name: torch.from_numpy(x) for part in parts for name, x in part.items()}

        for t in range(steps):
            found.losses.append(self.backward(t))
            found.gradients.append(gathered(self.model.gradients()))
            found.norms.append(self.model.gradient_norm())
            self.update()
        found.weights = gathered(self.model.weights())
        return found


def mlp_bytes(o: MLPOptions, rank: int, n: int, in_mpi: bool, steps: int | None = None) -> Fraction:
    """Return the bytes that a rank sends in the run, or in `steps` steps without the norm."""
    owner = make_schedule(o.schedule, n, o.micro_batches, o.chunks).owner
    size, norm = DTYPES[o.dtype].itemsize, 8 if steps is None else 0
    sides = sum(rank in border for border in itertools.pairwise(owner) if len(set(border)) > 1)
    beside = 0 if in_mpi else Fraction(2 * (n - 1) * (size + norm), n)  # the loss, the norm
    return (steps or o.steps) * Fraction(sides * o.batch * o.hidden * size + beside)
