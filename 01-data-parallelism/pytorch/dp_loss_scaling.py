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

from collections.abc import Iterator
from contextlib import nullcontext
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common import comm
from common.comm import Group
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

from dp_basic import DataParallel
from dp_costs import zero_step
from dp_precision_proof import Scaled, ScalingOptions, in_precision, prove_scaling
from dp_training import check
from dp_zero import Zero, even


class LossScaler:
    """Scaler of the loss that decides for all ranks of `group` together whether they step.

        loss_scaler.scale(loss).backward()
        if loss_scaler.unscale(optimizer):       # after the reduction of the gradients
            clip; optimizer.step()

    The group must hold all ranks that take a step together, since each may have different gradients.
    """

    def __init__(self, group: Group, factor: float, interval: int) -> None:
        self.group, self.factor, self.interval, self.good = group, factor, interval, 0

    def get_scale(self) -> float:
        """Return the current scale."""
        return self.factor

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, on which to call backward."""
        return loss * self.factor

    @torch.no_grad()
    def unscale(self, optimizer: Optimizer) -> bool:
        """Divide the optimizer's gradients by the scale, in place, and set the next scale. All ranks must call this.

        Return False if a gradient of any rank overflowed: then no rank may step.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        overflow = torch.stack([~g.isfinite().all() for g in gradients]).any().float()
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


def train(job: Job[ScalingOptions], scaler: LossScaler) -> Iterator[Tensor]:
    """Train in float16 on the buckets of dp_basic.py or on ZeRO-2; yield the loss of each global batch."""
    model, group = job.model, job.group
    zero = Zero(model, model.layers, group, stage=2) if job.version == "zero2" else None
    dp = zero or DataParallel(model, group, job.options.bucket_mb)
    optimizer = job.optimizer(zero or model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with nullcontext() if zero or i == len(batch) else dp.no_sync():
                with torch.autocast(tokens_BS.device.type, torch.float16):
                    logits_BSV = model(tokens_BS)
                loss_sum, _ = cross_entropy_sum(logits_BSV, targets_BS)
                loss = loss_sum / count
                scaler.scale(loss).backward()
            losses.append(loss.detach())
        dp.finish()
        yield total(losses, group)  # here the gradients are still scaled
        if not scaler.unscale(optimizer):  # on all ranks or on none
            optimizer.zero_grad()  # a step without gradients changes nothing
        optimizer.step()


def train_by_torch(job: Job[ScalingOptions], scaler: torch.amp.GradScaler) -> Iterator[Tensor]:
    """Train likewise with torch's scaler and DDP; on one device, the reference, without DDP."""
    model, group = job.model, job.group
    ddp: Any = in_precision(model, torch.float16)
    if group.size > 1:
        ddp = DistributedDataParallel(model, process_group=group.pg, bucket_cap_mb=job.options.bucket_mb)
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
        scaler.step(optimizer)  # looks at the gradients of its own rank alone
        scaler.update()


def by_hand(job: Job[ScalingOptions]) -> LossScaler:
    """Return our scaler, in which all ranks decide together."""
    return LossScaler(job.group, job.options.scale, job.options.interval)


def by_torch(job: Job[ScalingOptions]) -> torch.amp.GradScaler:
    """Return torch's scaler."""
    return torch.amp.GradScaler(job.rt.device.type, job.options.scale, growth_interval=job.options.interval)


def step_bytes(name: str, model: nn.Module, group: Group, o: ScalingOptions) -> Fraction:
    """Return the bytes a rank sends in a step: those of float32, and our scaler's flag."""
    return zero_step(name, model, group, o) + Fraction(2 * (group.size - 1) * 4 * (name != "ddp"), group.size)


VERSIONS: dict[str, Scaled] = {
    "bucketed": (train, by_hand),
    "zero2": (train, by_hand),
    "ddp": (train_by_torch, by_torch),
}


def main(rt: Runtime, o: ScalingOptions) -> bool:
    """Check the options, and prove equality of the versions with one device."""
    check(rt, tuple(VERSIONS), o)
    if o.steps < 3 or not 1 <= o.overflow <= o.steps - 2:
        raise UsageError(
            f"--overflow {o.overflow} --steps {o.steps}: one step must come before the overflow and one after it; "
            f"--overflow 1 --steps {max(3, o.steps)} would do"
        )
    return prove_scaling(rt, even(rt, o), VERSIONS, step_bytes)  # zero2 reduces every micro-batch


if __name__ == "__main__":
    run(main, ScalingOptions)
