"""Loss scaling for float16: all ranks step, or none does.

    gradient of (s * loss) = s * gradient of loss        s lifts gradients into the range of float16, 6e-8 to 65504

    s * loss ─ backward ─ sum over ranks ─ inf or nan on ANY rank? ─ yes ─ no rank steps; s becomes s/2
                                                └ no ─ gradients / s, step; after k good steps in a row s becomes 2s

    a gradient overflows on rank 3, in the first layer:     rank 0    rank 1    rank 2    rank 3
    gradients of each rank                                                                inf
    all-reduced, as in dp_basic.py: on all                  inf       inf       inf       inf
    reduce-scattered, as in dp_zero.py: on one              inf

Versions, all in float16:
    bucketed    the scaler by hand on dp_basic.py
    zero2       the same on stage 2 of dp_zero.py: the rank that sees an overflow must inform the others
    ddp         torch's DDP and torch.amp.GradScaler

Cost: one flag of 4 bytes per step, all-reduced. Micikevicius et al., "Mixed precision training"
(arXiv:1710.03740).

    python dp_loss_scaling.py --nproc 4          torchrun --nproc_per_node=4 dp_loss_scaling.py
    mpirun -np 4 python dp_loss_scaling.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger, uncounted
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Count, Within
from common.launch.runtime import Runtime
from common.lesson.equality import (
    KINDS,
    OPTIMIZERS,
    Difference,
    Followed,
    MakeOptimizer,
    compare,
    watch,
    worst_of_world,
)
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.lesson.training import make_model
from common.models.transformer import Transformer, cross_entropy_sum

from dp_basic import DataParallel
from dp_costs import zero_run
from dp_precision_proof import AsRanks, Comparison, PrecisionOptions, at_first, in_precision
from dp_training import check
from dp_zero import Zero

VERSIONS = ("bucketed", "zero2", "ddp")
HALF = torch.float16


@dataclass
class ScalingOptions(PrecisionOptions):
    """Options: the scaler, and the step whose gradient overflows."""

    steps: Count = 6
    """Training steps."""
    scale: Annotated[float, Within(1e-6, 1e30)] = 4096.0
    """Initial loss scale; torch's is 65536. A power of two costs no precision."""
    interval: Count = 2
    """Steps in a row without overflow after which the scale doubles; torch's is 2000."""
    overflow: Count = 3
    """Number of the step, counted from 0, in which a gradient of the last rank overflows."""
    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""


class LossScaler:
    """Scaler of the loss that decides for all ranks of `group` together whether they step.

        loss_scaler.scale(loss).backward()
        if loss_scaler.unscale(gradients):       # after their reduction
            clip; optimizer.step()

    The group must hold all ranks that take a step together, since each may have different gradients.
    """

    def __init__(self, group: Group, factor: float, interval: int) -> None:
        self.group, self.factor, self.interval, self.good = group, factor, interval, 0
        self.factors: list[float] = []  # scale of each step so far
        self.seen: list[bool] = []  # did this rank see an overflow in it?

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which to call backward."""
        return loss * self.factor

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> bool:
        """Divide the gradients by the scale, in place, and set the next scale. All ranks must call this.

        Return False if a gradient of any rank overflowed: then no rank may step.
        """
        gradients = list(gradients)
        overflow = torch.stack([~g.isfinite().all() for g in gradients]).any().float()
        self.factors.append(self.factor)
        self.seen.append(bool(overflow))
        comm.all_reduce(overflow, self.group, "max")
        if overflow:
            self.factor, self.good = self.factor / 2, 0
            return False
        for g in gradients:
            g /= self.factor
        self.good += 1
        if self.good == self.interval:
            self.factor, self.good = self.factor * 2, 0
        return True

    def wrap(self, make: MakeOptimizer, tensors: list[Tensor]) -> Optimizer:
        """Return an optimizer that unscales before it steps.

        After an overflow it has no gradients, so its step changes nothing.
        """
        optimizer = make(tensors)

        def before(*_: object) -> None:
            if not self.unscale(p.grad for p in tensors if p.grad is not None):
                optimizer.zero_grad()

        optimizer.register_step_pre_hook(before)
        return optimizer


class TorchScaler:
    """torch.amp.GradScaler with the interface of LossScaler. It checks only the gradients of its own rank."""

    def __init__(self, device: torch.device, factor: float, interval: int) -> None:
        self.inner = torch.amp.GradScaler(device.type, factor, growth_interval=interval)
        self.factors: list[float] = []
        self.seen: list[bool] = []

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which to call backward."""
        scaled: Tensor = self.inner.scale(loss)
        return scaled

    def wrap(self, make: MakeOptimizer, tensors: list[Tensor]) -> Any:
        """Return this object, which steps in place of the optimizer."""
        self.optimizer = make(tensors)
        self.zero_grad = self.optimizer.zero_grad
        return self

    def step(self) -> None:
        """Step, unless a gradient overflowed; then set the next scale."""
        self.factors.append(self.inner.get_scale())
        self.inner.step(self.optimizer)
        self.inner.update()
        self.seen.append(self.inner.get_scale() < self.factors[-1])


def train(job: Job[ScalingOptions], scaler: LossScaler) -> Iterator[Tensor]:
    """Train in float16 on the buckets of dp_basic.py or on ZeRO-2; yield the loss of each global batch."""
    model, group = job.model, job.group
    zero = Zero(model, model.layers, group, stage=2) if job.version == "zero2" else None
    dp = zero or DataParallel(model, group, job.options.bucket_mb)
    job.make_optimizer = partial(scaler.wrap, job.make_optimizer)
    optimizer = job.optimizer(zero or model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with nullcontext() if zero or i == len(batch) else dp.no_sync():
                with torch.autocast(tokens_BS.device.type, HALF):
                    logits_BSV = model(tokens_BS)
                loss_sum, _ = cross_entropy_sum(logits_BSV, targets_BS)
                loss = loss_sum / count
                scaler.scale(loss).backward()
            losses.append(loss.detach())
        dp.finish()
        yield total(losses, group)  # here the gradients are still scaled
        optimizer.step()  # unscales first, and steps on all ranks or on none


def train_by_torch(job: Job[ScalingOptions], scaler: TorchScaler) -> Iterator[Tensor]:
    """Train likewise with torch's scaler and DDP; on one device, the reference, without DDP."""
    model, group = job.model, job.group
    ddp: Any = in_precision(model, HALF)
    if group.size > 1:
        ddp = DistributedDataParallel(model, process_group=group.pg, bucket_cap_mb=job.options.bucket_mb)
    job.make_optimizer = partial(scaler.wrap, job.make_optimizer)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with ddp.no_sync() if group.size > 1 and i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(ddp(tokens_BS), targets_BS)
                loss = loss_sum / count
                scaler.scale(loss * group.size).backward()  # DDP divides by the number of ranks
            losses.append(loss.detach())
        yield total(losses, group)
        optimizer.step()


def overflow_in(model: Transformer, scaler: LossScaler | TorchScaler, step: int) -> None:
    """Make a gradient overflow in the step's first micro-batch, as if its product had left float16's range."""
    weight: Tensor = model.layers[0].attention.q_proj.weight  # type: ignore[union-attr, assignment]
    done = list[int]()

    def hook(gradient: Tensor) -> Tensor:
        if len(scaler.factors) != step or done:
            return gradient
        done.append(step)
        return (gradient.half() * 2.0**40).float()

    weight.register_hook(hook)


def finite(followed: Followed) -> Followed:
    """Return the result without the gradients, recorded as scaled, of the steps in which they overflowed."""
    good = [t for t, norm in enumerate(followed.norms) if math.isfinite(norm)]
    gradients = [followed.gradients[t] for t in good]
    return replace(followed, gradients=gradients, norms=[followed.norms[t] for t in good])


def on_ranks(
    name: str, optimizer: str, rt: Runtime, o: ScalingOptions, deciding: Group | None = None
) -> tuple[Followed, LossScaler | TorchScaler]:
    """Train a version on all ranks; return (the result, the scaler).

    A gradient of the last rank overflows in the first micro-batch of step --overflow. deciding: the ranks that
    decide together whether to step, by default all.
    """
    mesh, model = Mesh(rt.world, dp=rt.world_size), make_model(replace(o, seed=o.seed + rt.rank), rt.device)
    job = Job(rt, o, name, model, mesh, "dp", OPTIMIZERS[optimizer], o.steps)
    scaler: LossScaler | TorchScaler
    if name == "ddp":
        scaler = TorchScaler(rt.device, o.scale, o.interval)
        steps = train_by_torch(job, scaler)
    else:
        scaler = LossScaler(deciding or rt.world, o.scale, o.interval)
        steps = train(job, scaler)
    if rt.rank == rt.world_size - 1:
        overflow_in(model, scaler, o.overflow)
    return finite(watch(steps, job, mesh)), scaler


def alone(optimizer: str, rt: Runtime, o: ScalingOptions, as_ranks: int = 0) -> tuple[Followed, TorchScaler]:
    """Train the reference, one device with torch's GradScaler and the same overflow; return it and the scaler.

    as_ranks: if not 0, use the micro-batches of so many ranks, one after another.
    """
    o = o if as_ranks else replace(o, micro_batches=1)
    model, scaler = make_model(o, rt.device), TorchScaler(rt.device, o.scale, o.interval)
    job = Job(rt, o, "one device", model, Mesh(Group.alone()), "dp", OPTIMIZERS[optimizer], o.steps)
    overflow_in(model, scaler, o.overflow)
    job.make_batches = partial(AsRanks, ranks=as_ranks or 1)
    return finite(watch(train_by_torch(job, scaler), job)), scaler


def run_bytes(name: str, model: nn.Module, group: Group, o: ScalingOptions) -> Fraction:
    """Return the bytes a rank sends in `o.steps` steps: those of float32, and our scaler's flags."""
    flags = 4 * o.steps * (name != "ddp")
    return zero_run(name, model, group, o) + Fraction(2 * (group.size - 1) * flags, group.size)


def ranks_where(mine: bool, group: Group) -> str:
    """Return the ranks on which `mine` is true, as text."""
    with uncounted():
        every = comm.all_gather(torch.tensor([int(mine)]), group).tolist()
    return " ".join(str(rank) for rank, true in enumerate(every) if true) or "none"


def prove(rt: Runtime, o: ScalingOptions) -> bool:
    """Train with every version and optimizer, on all ranks and on one device.

    Print the ranks that saw the overflow and those that skipped the step.
    """
    mesh = Mesh(rt.world, dp=rt.world_size)
    comparison = Comparison(
        f"largest relative difference from one device: {rt.world_size} ranks, {o.model}, float16, {o.steps} steps"
    )
    title = f"in step {o.overflow} a gradient of rank {rt.world_size - 1} overflows"
    skips = Table(
        "version",
        "ranks that see it",
        "ranks that skip the step",
        "scale of each step",
        title=title,
        title_justify="left",
    )
    for name in o.versions:
        for optimizer in OPTIMIZERS:
            whole, expected = alone(optimizer, rt, o)
            with Listener(rt.world) if name == "ddp" else Ledger() as ledger:
                mine, scaler = on_ranks(name, optimizer, rt, o)
            found = dict.fromkeys(KINDS, Difference(math.inf, "another step was skipped"))
            if scaler.factors == expected.factors:
                found = compare(whole, mine)
            # DDP multiplies its losses by n, which rounds differently for n = 3
            first = None
            if name != "ddp":
                first = at_first(alone(optimizer, rt, replace(o, steps=1), rt.world_size)[0], mine, mesh)
            counted = ledger.bytes() - ledger.bytes("bookkeeping")
            formula = run_bytes(name, make_model(o, rt.device), rt.world, o)
            comparison.add(name, optimizer, HALF, first, worst_of_world(found, mesh), counted, formula)
        skipped = scaler.factors[o.overflow] > scaler.factors[o.overflow + 1]
        saw = ranks_where(scaler.seen[o.overflow], rt.world)
        skips.add_row(name, saw, ranks_where(skipped, rt.world), " ".join(f"{s:g}" for s in scaler.factors))
    console(rt).print(comparison.table, skips)
    console(rt).print(comparison.sentence())
    return not comparison.wrong


def main(rt: Runtime, o: ScalingOptions) -> bool:
    """Check the options, and prove equality of the versions with one device."""
    check(rt, VERSIONS, o)
    if o.steps < 3 or not 1 <= o.overflow <= o.steps - 2:
        raise UsageError(
            f"--overflow {o.overflow} --steps {o.steps}: one step must come before the overflow and one after it; "
            f"--overflow 1 --steps {max(3, o.steps)} would do"
        )
    # zero2 reduces every micro-batch, so all ranks need equally many
    return prove(rt, replace(o, micro_batches=max(1, min(o.micro_batches, o.batch // rt.world_size))))


if __name__ == "__main__":
    run(main, ScalingOptions)
