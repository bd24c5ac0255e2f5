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
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger, uncounted
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Count, Within
from common.launch.runtime import Runtime
from common.lesson.equality import KINDS, OPTIMIZERS, Difference, MakeOptimizer, compare, worst_of_world
from common.lesson.runner import console, run
from common.lesson.training import Batches, make_model

from dp_mixed_precision import Comparison, PrecisionOptions, Trainer, at_first, one_device
from dp_training import check
from dp_zero import make_version
from dp_zero import run_bytes as plain_run_bytes

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


def with_scaler(trainer: Trainer, scaler: LossScaler | TorchScaler) -> Trainer:
    """Return the trainer with its loss and its optimizer under `scaler`."""
    return replace(trainer, scale=scaler.scale, wrap=scaler.wrap)


def overflow_in(trainer: Trainer, step: int, micro_batch: int) -> None:
    """Make a gradient overflow in that micro-batch, as if its product had left the range of float16."""
    weight, there = trainer.model.layers[0].attention.q_proj.weight, [step, micro_batch]  # type: ignore[union-attr]
    weight.register_hook(lambda g: (g.half() * 2.0**40).float() if trainer.at == there else g)  # type: ignore


def on_ranks(name: str, rt: Runtime, o: ScalingOptions) -> tuple[Trainer, LossScaler | TorchScaler]:
    """Return (trainer, scaler) of a version on all ranks.

    A gradient of the last rank overflows in the first micro-batch of step --overflow.
    """
    model = make_model(replace(o, seed=o.seed + rt.rank), rt.device)
    version, batches = make_version(name, model, rt, o), Batches(o, rt.world, rt.device)
    scaler = (
        TorchScaler(rt.device, o.scale, o.interval)
        if name == "ddp"
        else LossScaler(rt.world, o.scale, o.interval)
    )
    mesh = Mesh(rt.world, dp=rt.world_size)
    trainer = with_scaler(Trainer(model, version, rt.world, batches.parts, HALF, mesh), scaler)
    if rt.rank == rt.world_size - 1:
        overflow_in(trainer, o.overflow, 0)
    return trainer, scaler


def alone(rt: Runtime, o: ScalingOptions, as_ranks: int = 0) -> tuple[Trainer, TorchScaler]:
    """Return (trainer, scaler) of the reference: one device, torch's GradScaler, the same overflow."""
    scaler = TorchScaler(rt.device, o.scale, o.interval)
    trainer = with_scaler(one_device(HALF, rt, o, as_ranks), scaler)
    overflow_in(trainer, o.overflow, 0)
    return trainer, scaler


def run_bytes(name: str, model: nn.Module, group: Group, o: ScalingOptions) -> Fraction:
    """Return the bytes a rank sends in `o.steps` steps: those of float32, and our scaler's flags."""
    flags = 4 * o.steps * (name != "ddp")
    return plain_run_bytes(name, model, group, o) + Fraction(2 * (group.size - 1) * flags, group.size)


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
            reference, expected = alone(rt, o)
            whole = reference.train(optimizer, o.steps)
            with Listener(rt.world) if name == "ddp" else Ledger() as ledger:
                trainer, scaler = on_ranks(name, rt, o)
                mine = trainer.train(optimizer, o.steps)
            found = dict.fromkeys(KINDS, Difference(math.inf, "another step was skipped"))
            if scaler.factors == expected.factors:
                found = compare(whole, mine)
            # DDP multiplies its losses by n, which rounds differently for n = 3
            first = (
                at_first(alone(rt, o, rt.world_size)[0].train(optimizer, 1), mine, mesh)
                if name != "ddp"
                else None
            )
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
