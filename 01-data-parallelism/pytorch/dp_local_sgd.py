"""Local SGD: each rank trains a replica by itself, and every H steps the ranks meet to average.

    H steps on rank r    w_r ← inner optimizer(w_r, gradient of its own part)        no messages
    then                 Δ = sum over ranks of T_r/T (w - w_r)                       T_r of T targets seen
                         m ← μ m + Δ        w ← w - η (Δ + μ m)        w_r ← w

    rank 0    w ─ step ─ step ─ step ─ w₀ ─┐ all-reduce ┌─ w ─ step ─ step ─ step ─ …
                                           ├──── Δ ─────┤
    rank 1    w ─ step ─ step ─ step ─ w₁ ─┘            └─ w ─ step ─ step ─ step ─ …

    local SGD (arXiv:1805.09767)   η = 1, μ = 0: w becomes the average of the w_r
    DiLoCo    (arXiv:2311.08105)   inner AdamW; η = 0.7, μ = 0.9: an outer step of Nesterov momentum on Δ

With H = 1, inner SGD, η = 1 and μ = 0 this equals data parallelism up to rounding. Otherwise it is another
algorithm, and we compare it with one device that loops over n replicas.

Cost: a rank sends 2(n-1)/n of the model every H steps instead of every step. Memory: w and m, two more models
per rank (one for local SGD). The inner optimizer's state and the model's buffers are not averaged; each rank
keeps its own.

    python dp_local_sgd.py --nproc 4    torchrun --nproc_per_node=4 dp_local_sgd.py
    mpirun -np 4 python dp_local_sgd.py                  with --plot curves.png: loss against bytes, H = 4, 16, 64
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from common import comm
from common.comm import Group
from common.comm.checked import declare
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.comparison import report
from common.lesson.job import Batch, Job, Train, total
from common.lesson.runner import run
from common.models.transformer import Transformer, cross_entropy_sum

from dp_basic import broadcast_model
from dp_local_sgd_proof import prove_local_sgd, timed
from dp_replicas import LocalOptions, outer
from dp_training import check, joined


class LocalSGD:
    """Periodic averaging (a "meeting") of replicas that train by themselves.

        local = LocalSGD(model, group, every=500, rate=0.7, momentum=0.9)      # DiLoCo's outer step
        loss(...).backward()                # the mean over this rank's targets
        optimizer.step()
        local.step(targets)                 # number of these targets

    Between meetings the ranks' weights differ: call meet() before the weights are saved or evaluated. Ranks
    may see unequal parts, but each makes every step. Parameters that a rank did not use are averaged as they
    are. Raises ValueError for `every` below 1.
    """

    def __init__(
        self, model: nn.Module, group: Group, every: int, rate: float = 1.0, momentum: float = 0.0
    ) -> None:
        if every < 1:
            raise ValueError(f"every {every} steps: ranks meet after 1 step or more")
        broadcast_model(model, group)
        self.parameters, self.group, self.every = list(model.parameters()), group, every
        for p in self.parameters:
            declare(p, dp="V")  # replicas differ between the meetings
        self.rate, self.momentum = rate, momentum
        self.w = joined(self.parameters)
        self.m = torch.zeros_like(self.w) if momentum else self.w.new_zeros(())
        self.steps = self.targets = 0

    def step(self, targets: int) -> None:
        """Count one step with this many targets; meet after every H steps."""
        self.steps, self.targets = self.steps + 1, self.targets + targets
        if self.steps % self.every == 0:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """Average the changes of the ranks' weights, take the outer step, and load the result."""
        moved = (self.w - joined(self.parameters)) * self.targets
        moved = torch.cat([moved, moved.new_tensor([self.targets])])  # the same message sums the targets
        comm.all_reduce(moved, self.group)
        if not moved[-1]:
            return  # no rank has trained since the last meeting
        delta = moved[:-1] / moved[-1]
        self.m = self.momentum * self.m + delta if self.momentum else self.m
        self.w -= self.rate * (delta + self.momentum * self.m)
        pieces = self.w.split([p.numel() for p in self.parameters])
        for p, piece in zip(self.parameters, pieces, strict=True):
            p.copy_(piece.view_as(p))
        self.targets = 0


def local_step(model: Transformer, batch: Batch, optimizer: torch.optim.Optimizer) -> tuple[Tensor, int]:
    """Step on this rank's samples alone; return (the mean loss of its targets, their number)."""
    count, losses = batch.count_targets(), []
    optimizer.zero_grad()
    for tokens_BS, targets_BS in batch:
        loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
        loss = loss_sum / count
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return total(losses), count


def train(job: Job[LocalOptions]) -> Iterator[Tensor]:
    """Train this rank's replica on its own samples, and meet every H steps; yield the replica's loss."""
    local = LocalSGD(job.model, job.group, job.options.every, *outer(job.version, job.options))
    optimizer = job.optimizer(job.model)
    for batch in job.batches():
        loss, targets = local_step(job.model, batch, optimizer)
        local.step(targets)
        yield loss


def train_by_torch(job: Job[LocalOptions]) -> Iterator[Tensor]:
    """Train likewise with torch's averager, which does not weigh the replicas."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # compiles scripts: slow, and warns of it

    every = job.options.every
    broadcast_model(job.model, job.group)
    averager = PeriodicModelAverager(every, every - 1, job.group.pg)  # first after H steps, not after 1
    optimizer = PostLocalSGDOptimizer(job.optimizer(job.model), averager)
    for batch in job.batches():
        loss, _ = local_step(job.model, batch, optimizer)
        yield loss


VERSIONS: dict[str, Train] = {"local-sgd": train, "diloco": train, "torch": train_by_torch}


def main(rt: Runtime, o: LocalOptions) -> bool:
    """Prove equality with replicas on one device, or with --benchmark time the versions."""
    check(rt, tuple(VERSIONS), o)
    for name, every, steps in (
        ("--every", o.every, o.steps),
        *(("--periods", h, o.curve_steps) for h in o.periods if o.plot),
    ):
        if every > steps:
            raise UsageError(f"{name} {every}: the run ends after {steps} steps, before the first meeting")
    if rt.world_size == 1:  # torch's averager needs a process group
        o = replace(o, versions=tuple(name for name in o.versions if name != "torch"))
    if not o.benchmark:
        return prove_local_sgd(rt, o, VERSIONS)
    report(rt, o, timed(rt, o, VERSIONS))
    return True


if __name__ == "__main__":
    run(main, LocalOptions)
