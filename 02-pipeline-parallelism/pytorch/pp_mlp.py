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
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from common.comm import Group, ledger
from common.comm.mesh import Mesh
from common.data.text import mlp_batch
from common.launch.command_line import Width, Within
from common.launch.runtime import Runtime
from common.lesson.equality import Followed, of_all_stages
from common.lesson.job import Job
from common.lesson.runner import DTYPES
from common.lesson.training import Batches
from common.models.mlp import MLP, sizes
from common.models.transformer import cross_entropy_sum

from pp_costs import sides
from pp_deferred import Deferred
from pp_executor import Executor
from pp_schedule import Schedule
from pp_schedules import make_schedule
from pp_stages import evenly
from pp_training import PipelineOptions


@dataclass
class MLPOptions(PipelineOptions, without=("balance", "checkpointing", "scaling", "check")):
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

    def take(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return (x_BI, y_B) of samples [lo, hi) of the step's batch."""
        o = self.options
        return mlp_batch(self.text.train, o.seed, step, o.batch, o.context, lo, hi, DTYPES[o.dtype])


def plain_mlp(o: MLPOptions) -> MLP:
    """Return the whole MLP."""
    return MLP(sizes(o.context, o.hidden, o.layers), o.seed, DTYPES[o.dtype])


def mlp_stage(model: MLP, layers: range, x_BI: Tensor, positions: Tensor) -> Tensor:
    """Run some layers of the MLP, with the GELU before each but the first of all.

    A stage returns the sum before the next GELU.
    """
    for i in layers:
        x_BI = model.get_submodule(f"layers.{i}")(x_BI if i == 0 else gelu(x_BI, approximate="tanh"))
    return x_BI


def mlp_in_stages(model: MLP, mesh: Mesh, schedule: Schedule) -> Executor:
    """Return the executor of this rank's stages. `model` keeps only their layers, under the same names."""
    rank, deferred = mesh.at["pp"], Deferred()
    cuts, mine = evenly(len(model.layers), schedule.stages), schedule.mine(rank)
    first = next(model.parameters())  # [hidden, inputs]
    width, dtype = len(first), first.dtype
    model.layers = nn.ModuleDict({str(i): model.layers[i] for s in mine for i in cuts[s]})  # type: ignore[assignment]
    if any(i.op == "W" for i in schedule.lists[rank]):
        deferred.replace(model)
    stages: dict[int, Any] = {s: partial(mlp_stage, model, cuts[s]) for s in mine}
    between = lambda x_BI: (len(x_BI), width)  # noqa: E731
    return Executor(schedule, stages, mesh, cross_entropy_sum, between, dtype, deferred)


def train(job: Job[MLPOptions]) -> Iterator[Tensor]:
    """Train the MLP by --schedule; yield the loss of each batch."""
    o, model = job.options, cast(MLP, job.model)
    schedule = make_schedule(o.schedule, job.group.size, o.micro_batches, o.chunks)
    executor = mlp_in_stages(model, job.mesh, schedule)
    optimizer = job.optimizer(model)  # of this rank's layers
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

    def steps(self) -> Iterator[float]:
        """Train without end; yield each step's loss. Gradients stay until the next step."""
        for t in itertools.count():
            x_BI, y_B = self.batches.take(t, 0, self.batches.options.batch)
            loss: float = self.model.loss_and_gradients(x_BI.numpy(), y_B.to(torch.uint8).numpy())
            ledger.record("send", "pp", self.model.bytes_sent, self.model.blocked_seconds)
            if self.optimizer == "sgd":  # the hyperparameters of OPTIMIZERS
                self.model.sgd(0.1)
            else:
                self.model.adamw(1e-3, epsilon=1e-5)
            yield loss

    def watched(self, steps: int, mesh: Mesh) -> Followed:
        """Train `steps` steps; return the same record as common.lesson.equality.watch does for a model in torch."""
        found = Followed()

        def gathered(values: dict[str, Any]) -> dict[str, Tensor]:
            return of_all_stages({name: torch.from_numpy(x) for name, x in values.items()}, mesh)

        for loss in itertools.islice(self.steps(), steps):
            found.losses.append(loss)
            found.gradients.append(gathered(self.model.gradients()))
            found.norms.append(self.model.gradient_norm())
        found.weights = gathered(self.model.weights())
        return found


def mlp_bytes(o: MLPOptions, rank: int, n: int, in_mpi: bool) -> Fraction:
    """Return the bytes that a rank sends in a step; pp_mpi sums the loss inside MPI, uncounted."""
    owner = make_schedule(o.schedule, n, o.micro_batches, o.chunks).owner
    size = DTYPES[o.dtype].itemsize
    return sides(owner, rank) * o.batch * o.hidden * size + Fraction(0 if in_mpi else 2 * (n - 1) * size, n)
