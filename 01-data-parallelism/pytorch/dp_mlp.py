"""The MLP of chapter 01, trained data-parallel in each language; `dp_languages.py` compares and times them.

                        forward, backward, optimizer    gradients are summed by
    pytorch-mlp         torch                           DataParallel of dp_basic.py, process group
    dp_libtorch         torch                           the same hooks and buckets in C++, the same process group
    dp_libtorch-zero1   torch, the optimizer on shards  the same hooks, buckets reduce-scattered: ZeRO-1
    dp_mpi              its own C++ on BLAS             buckets by MPI_Iallreduce
    dp_mpi-ring         the same                        our ring of MPI messages, each counted
    dp_mpi-zero1        the same, step on a shard       buckets by MPI_Ireduce: ZeRO-1
    ddp-mlp             torch                           DistributedDataParallel (on one rank plain torch)

I inputs (8 a byte of context)  B samples
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

from common.comm import Group, ledger
from common.comm.ledger import Ledger
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.comm.placement import FlatShard, place
from common.data.text import mlp_batch
from common.launch.command_line import Width, Within
from common.launch.runtime import Runtime
from common.lesson.equality import OPTIMIZERS, Followed, Start, watch, with_units
from common.lesson.job import Job, Train, one_device, total
from common.lesson.runner import DTYPES
from common.lesson.training import Batches
from common.models.mlp import MLP, sizes
from common.models.transformer import cross_entropy_sum

import dp_basic
from dp_costs import bytes_of_step
from dp_training import DataParallelOptions

VERSIONS = (
    "pytorch-mlp",
    "dp_libtorch",
    "dp_libtorch-zero1",
    "dp_mpi",
    "dp_mpi-ring",
    "dp_mpi-zero1",
    "ddp-mlp",
)


@dataclass
class MLPOptions(DataParallelOptions, without=("plot",)):
    """Options: the MLP and its batch. A sample has one target."""

    model: Annotated[str, tyro.conf.Suppress] = "mlp"
    sequence: Annotated[int, tyro.conf.Suppress] = 1
    context: Width = 16
    """Number of bytes before the one to predict."""
    hidden: Width = 64
    """Width of the hidden layers."""
    layers: Annotated[int, Within(1, 1000)] = 3
    """Number of linear layers."""
    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""


@dataclass
class Samples(Batches):
    """This rank's part of every global batch, cut from the text once, so that no timing includes it."""

    options: MLPOptions
    first_only: bool = False
    """Give the batch of step 0 in every step."""
    cut: dict[int, list[tuple[Tensor, ...]]] = field(default_factory=dict)

    def take(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return (x_BI, y_B) of samples [lo, hi) of the step's global batch."""
        o = self.options
        return mlp_batch(self.text.train, o.seed, step, o.batch, o.context, lo, hi, DTYPES[o.dtype])

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """Return (x_BI, y_B) of each micro-batch."""
        step = 0 if self.first_only else step
        if step not in self.cut:
            self.cut[step] = super().parts(step)
        return self.cut[step]


def make_model(o: MLPOptions, seed: int) -> MLP:
    """Return the MLP in torch; dp_mpi makes the same MLP from the same seed."""
    return MLP(sizes(o.context, o.hidden, o.layers), seed, DTYPES[o.dtype])


def train_libtorch(job: Job[MLPOptions]) -> Iterator[Tensor]:
    """Train with the hooks and buckets of dp_libtorch, in C++; yield the loss of each global batch."""
    import dp_libtorch

    model, group, zero = job.model, job.group, job.version == "dp_libtorch-zero1"
    kind = dp_libtorch.Zero1 if zero else dp_libtorch.DataParallel
    tensors = [*model.parameters(), *model.buffers()]
    dp = kind(tensors, job.rt.world.pg, int(job.options.bucket_mb * 2**20))
    optimizer = job.optimizer(Pieces(model, dp) if zero else model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (x_BI, y_B) in enumerate(batch, 1):
            with dp.no_sync() if i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(model(x_BI), y_B)
                loss = loss_sum / count
                loss.backward()
            losses.append(loss.detach())
        dp.finish()
        optimizer.step()
        if zero:
            dp.gather()
        for operation, n_bytes, seconds in dp.take_messages():  # of the C++ code
            ledger.record(operation, group.axis, Fraction(n_bytes, group.size), seconds)
        yield total(losses, group)


LOOPS: dict[str, Train] = {
    "pytorch-mlp": dp_basic.train,
    "dp_libtorch": train_libtorch,
    "dp_libtorch-zero1": train_libtorch,
    "ddp-mlp": dp_basic.train_ddp,
}


def torch_job(name: str, optimizer: str, rt: Runtime, o: MLPOptions, model: MLP) -> Job[MLPOptions]:
    """Return the training run of one of LOOPS on all ranks."""
    mesh = Mesh(rt.world, dp=rt.world_size)
    return Job(rt, o, name, model, mesh, "dp", OPTIMIZERS[optimizer], make_batches=Samples)  # type: ignore[arg-type]


class Pieces:
    """Shards of the parameters that Zero1's optimizers step on, under the parameters' names."""

    def __init__(self, model: nn.Module, zero: Any) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.pieces: list[tuple[str, Tensor]] = []
        for (name, p), piece, lengths in zip(trained, zero.pieces(), zero.sizes(), strict=True):
            place(piece, "dp", FlatShard(p.shape, tuple(lengths)))
            self.pieces.append((name, piece))

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return (name, this rank's run, flat) of each parameter."""
        return self.pieces


class MPIModel:
    """MLP of dp_mpi with one of OPTIMIZERS, on the same samples as the other versions."""

    def __init__(self, name: str, optimizer: str, rt: Runtime, o: MLPOptions, samples: Samples) -> None:
        from mpi4py import MPI

        import dp_mpi

        self.batch, self.samples, self.axis = o.batch, samples, rt.world.axis
        self.zero = name == "dp_mpi-zero1"
        self.model = dp_mpi.MLP(
            sizes(o.context, o.hidden, o.layers),
            dtype=o.dtype,
            comm=MPI.COMM_WORLD,
            seed=o.seed + rt.rank,  # the broadcast must mend this
            bucket_mb=o.bucket_mb,
            reduction="ring" if name == "dp_mpi-ring" else "overlapped",
            zero=int(self.zero),
        )
        self.optimizer = optimizer
        self.rates = OPTIMIZERS[optimizer]([nn.Parameter(torch.zeros(1))]).defaults
        self.arrays: dict[int, tuple[Any, Any, int]] = {}

    def backward(self, t: int) -> float:
        """Compute the summed gradients of global step t; return the global loss."""
        if t not in self.arrays:
            x, y = zip(*self.samples.parts(t), strict=True)
            self.arrays[t] = torch.cat(x).numpy(), torch.cat(y).to(torch.uint8).numpy(), len(x)
        x_BI, y_B, micro_batches = self.arrays[t]
        loss: float = self.model.loss_and_gradients(x_BI, y_B, self.batch, micro_batches)
        operation = "reduce_scatter" if self.zero else "all_reduce"
        ledger.record(operation, self.axis, self.model.bytes_sent, self.model.exposed_seconds)
        return loss

    def update(self) -> None:
        """Run one step of the optimizer; with ZeRO-1, then gather the weights."""
        r, before = self.rates, (self.model.bytes_sent, self.model.exposed_seconds)
        if self.optimizer == "sgd":
            self.model.sgd(r["lr"])
        else:
            self.model.adamw(r["lr"], r["betas"], r["eps"], r["weight_decay"])
        if self.zero:
            n_bytes, seconds = self.model.bytes_sent - before[0], self.model.exposed_seconds - before[1]
            ledger.record("all_gather", self.axis, n_bytes, seconds)

    @property
    def state_bytes(self) -> int:
        """Bytes of AdamW's two moments on this rank."""
        n_bytes: int = self.model.state_bytes
        return n_bytes

    def follow(self, steps: int) -> Followed:
        """Train `steps` steps; return the same record as common.lesson.equality.follow does for a model in torch."""
        result = Followed()
        for t in range(steps):
            result.losses.append(self.backward(t))
            gradients = self.model.gradients()
            result.gradients.append({name: torch.from_numpy(g) for name, g in gradients.items()})
            result.norms.append(self.model.gradient_norm())
            self.update()
        result.weights = {name: torch.from_numpy(w) for name, w in self.model.weights().items()}
        return result


def train(name: str, optimizer: str, rt: Runtime, o: MLPOptions) -> tuple[Followed, Fraction]:
    """Train `o.steps` steps of a version; return (the results, the bytes a rank sent on average)."""
    from mpi4py import MPI

    samples = Samples(o, rt.world, rt.device)
    with Listener(rt.world) if name == "ddp-mlp" else Ledger() as counted:
        if name.startswith("dp_mpi"):
            followed = MPIModel(name, optimizer, rt, o, samples).follow(o.steps)
        else:
            # the broadcast must mend the other weights
            job = torch_job(name, optimizer, rt, o, make_model(o, o.seed + rt.rank))
            job.steps = o.steps
            followed = watch(LOOPS[name](job), job, job.mesh)
    sent = counted.bytes() - counted.bytes("bookkeeping")
    return followed, MPI.COMM_WORLD.allreduce(sent) / rt.world_size


def on_one_device(optimizer: str, rt: Runtime, o: MLPOptions) -> Followed:
    """Train in plain torch on the whole batch, on every rank separately; return the result, with units."""

    def run(start: Start) -> Followed:
        model, whole = start(make_model(o, o.seed)), replace(o, micro_batches=1)
        job = Job(rt, whole, "one device", model, Mesh(Group.alone()), "dp", OPTIMIZERS[optimizer], o.steps)
        job.make_batches = Samples
        return watch(one_device(job), job)

    return with_units(run)


def padding_of_step(model: nn.Module, group: Group, o: MLPOptions) -> Fraction:
    """Return the bytes that ZeRO-1 sends beyond an all-reduce.

    Each bucket is padded to n equal runs, in the reduce-scatter and in the all-gather.
    """
    numbers, size, padding = 0, next(model.parameters()).element_size(), 0
    for p in reversed(list(model.parameters())):
        if numbers * size >= int(o.bucket_mb * 2**20):
            numbers, padding = 0, padding + -numbers % group.size
        numbers += p.numel()
    return Fraction(2 * (group.size - 1) * (padding + -numbers % group.size) * size, group.size)


def bytes_of_gradients(name: str, model: nn.Module, group: Group, o: MLPOptions) -> Fraction:
    """Return the bytes a rank sends in a step.

    The versions of dp_mpi count only gradients. The others also count the loss, the number of targets and,
    except ddp-mlp, the flags.
    """
    if name == "dp_libtorch-zero1":
        return bytes_of_step(model, group) + padding_of_step(model, group, o)
    if not name.startswith("dp_mpi"):
        return bytes_of_step(model, group, flags=name != "ddp-mlp")
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    return Fraction(2 * (group.size - 1) * gradients, group.size)
