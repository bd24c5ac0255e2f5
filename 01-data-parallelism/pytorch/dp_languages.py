"""Data parallelism in three languages: the same MLP, the same text, the same weights.

                       the same seed, the same text, cut over ranks and micro-batches
                   ┌──────────────────────────┼──────────────────────────┐
              pytorch-mlp                dp_libtorch                  dp_mpi
    backward  torch.autograd             torch.autograd               its own, C++ on BLAS
    buckets   Python (dp_basic.py)       C++ hooks (libtorch/)        C++ (cpp/)
    messages  process group              process group                MPI
                   └──────────────────────────┼──────────────────────────┘
                       equal: loss, every gradient, their norm, the weights

Cost of a step: in all versions each rank sends 2(n-1)/n bytes per byte of gradient. We count the bytes that
our own code, or DDP, sends, as the mean over ranks. Bytes sent inside MPI_Iallreduce are not visible, so
dp_mpi is counted in its second form, our ring. The versions:

                        forward, backward, optimizer    gradients are summed by
    pytorch-mlp         torch                           DataParallel of dp_basic.py, process group
    dp_libtorch         torch                           the same hooks and buckets in C++, the same process group
    dp_libtorch-zero1   torch, the optimizer on shards  the same hooks, buckets reduce-scattered: ZeRO-1
    dp_mpi              its own C++ on BLAS             buckets by MPI_Iallreduce
    dp_mpi-ring         the same                        our ring of MPI messages, each counted
    dp_mpi-zero1        the same, step on a shard       buckets by MPI_Ireduce: ZeRO-1
    ddp-mlp             torch                           DistributedDataParallel (on one rank plain torch)

dp_mpi communicates through mpi4py, so several ranks need mpirun. --benchmark times whole steps, AdamW
included, in turn, with one thread per rank.

    mpirun -np 4 python dp_languages.py          python dp_languages.py       (one rank)
    mpirun -np 2 python dp_languages.py --benchmark --dtype float32 --batch 512 --hidden 1024 --layers 4 --steps 20
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import ledger
from common.comm.placement import FlatShard, place
from common.launch.runtime import Runtime
from common.lesson.job import Job, Train, total
from common.lesson.languages import check_modules
from common.lesson.runner import run
from common.models.mlp import sizes
from common.models.transformer import cross_entropy_sum

import dp_basic
from dp_mlp import MLPOptions, prove_mlp, time_in_turn
from dp_training import check


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


class InMPI:
    """Copies of the weights and gradients of dp_mpi's MLP, named as those of a module."""

    def __init__(self, mlp: Any) -> None:
        self.mlp = mlp

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Yield (name, weight with its gradient). Collective with ZeRO-1."""
        gradients = self.mlp.gradients()
        for name, values in self.mlp.weights().items():
            weight = torch.from_numpy(values)
            weight.grad = torch.from_numpy(gradients[name])
            yield name, weight


def train_mpi(job: Job[MLPOptions]) -> Iterator[Tensor]:
    """Train dp_mpi's MLP, whose passes, messages and optimizer are in C++; yield the loss of each global batch."""
    from mpi4py import MPI

    import dp_mpi

    o, zero = job.options, job.version == "dp_mpi-zero1"
    mlp = dp_mpi.MLP(
        sizes(o.context, o.hidden, o.layers),
        dtype=o.dtype,
        comm=MPI.COMM_WORLD,
        seed=o.seed + job.rt.rank,  # the broadcast must mend this
        bucket_mb=o.bucket_mb,
        reduction="ring" if job.version == "dp_mpi-ring" else "overlapped",
        zero=int(zero),
    )
    rates = job.optimizer(InMPI(mlp)).defaults  # of torch's optimizer, which takes no step
    for batch in job.batches():
        x_BI, y_B = batch.whole()
        loss = mlp.loss_and_gradients(x_BI.numpy(), y_B.to(torch.uint8).numpy(), o.batch, len(batch))
        if "betas" in rates:
            mlp.adamw(rates["lr"], rates["betas"], rates["eps"], rates["weight_decay"])
        else:
            mlp.sgd(rates["lr"])
        # with ZeRO-1 the step gathers the weights
        ledger.record("all_reduce", job.group.axis, mlp.bytes_sent, mlp.exposed_seconds)
        yield torch.tensor(loss, dtype=torch.float64)


LOOPS: dict[str, Train] = {
    "pytorch-mlp": dp_basic.train,
    "dp_libtorch": train_libtorch,
    "dp_libtorch-zero1": train_libtorch,
    "dp_mpi": train_mpi,
    "dp_mpi-ring": train_mpi,
    "dp_mpi-zero1": train_mpi,
    "ddp-mlp": dp_basic.train_ddp,
}


@dataclass
class LanguageOptions(MLPOptions, without=("check",)):
    """Options of dp_languages.py."""

    versions: tuple[str, ...] = tuple(LOOPS)
    """Versions to run."""


def prepare(rt: Runtime, o: LanguageOptions) -> None:
    """Raise UsageError for options that cannot run; limit every library of this rank to one thread."""
    check(rt, tuple(LOOPS), o)
    check_modules(rt, "dp_languages.py", ("dp_mpi", "dp_libtorch"))


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    prepare(rt, o)
    return time_in_turn(rt, o, LOOPS) if o.benchmark else prove_mlp(rt, o, LOOPS)


if __name__ == "__main__":
    run(main, LanguageOptions)
