"""A training step in practice: accumulation, clipping and a learning-rate schedule, equal to one device.

    weights(t+1) = weights(t) - rate(t) * clip( sum over ranks and micro-batches of their gradients )

    positions of the endless order      8  9 10 11 | 12 13 14 15       step t: positions tB to (t+1)B
    ranks                               rank 0       rank 1
    micro-batches                       [8 9][10 11] [12 13][14 15]
    forward, backward                   gradients add up in p.grad
    the last micro-batch                all-reduce: once per step, not once per micro-batch
    every rank                          clip by the norm of the sum, set the rate, step

Versions, all on shuffled epochs, each against one device without micro-batches, with torch's clipping and schedule:
    no_sync     M micro-batches, one all-reduce, in the last
    sync        an all-reduce in each micro-batch: the same result for M times the bytes
    clip        no_sync, with the norm of the gradient limited to --clip
    schedule    no_sync, with a learning rate that warms up linearly, then falls as a cosine
    all         no_sync, clip, schedule, and the checkpointing of dp_checkpointing.py
    ddp         the same as `all`, by torch: DDP, clip_grad_norm_, SequentialLR

Cost of a step: each rank sends 2(n-1)/n bytes per byte of gradient, for any M, and M times as many with
`sync`. Our clipping all-reduces 8 bytes more; the schedule and checkpointing send nothing. Memory: the
activations of one micro-batch, not of the whole batch.

    python dp_accumulation.py --nproc 4          torchrun --nproc_per_node=4 dp_accumulation.py
    mpirun -np 4 python dp_accumulation.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DistributedSampler, TensorDataset

from common.comm import Group
from common.comm.placement import clip_gradients
from common.data.sampler import Indices, samples_at
from common.data.text import PADDING, lm_samples, rank_slice
from common.errors import UsageError
from common.launch.command_line import Count, Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.equality import MakeOptimizer
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.lesson.training import Batches
from common.models.transformer import cross_entropy_sum

from dp_basic import DataParallel
from dp_checkpointing import checkpoint_layers
from dp_costs import basic_start, basic_step
from dp_training import DataParallelOptions, check

LOWEST = 0.1  # end of the cosine, as a fraction of the full rate


@dataclass(frozen=True)
class Recipe:
    """Additions of one version to the plain step."""

    sync_each: bool = False
    clip: bool = False
    schedule: bool = False
    checkpoint: bool = False
    library: bool = False


RECIPES = {
    "no_sync": Recipe(),
    "sync": Recipe(sync_each=True),
    "clip": Recipe(clip=True),
    "schedule": Recipe(schedule=True),
    "all": Recipe(clip=True, schedule=True, checkpoint=True),
    "ddp": Recipe(clip=True, schedule=True, checkpoint=True, library=True),
}


@dataclass
class StepOptions(DataParallelOptions):
    """Options: the data set, clipping, and the learning-rate schedule."""

    steps: Count = 5
    """Training steps."""
    samples: Count = 23
    """Number of samples in the data set, each of --sequence bytes, from the beginning of the text."""
    clip: Annotated[float, Within(1e-9, 1e9)] = 0.5
    """Largest norm of the gradient; a longer gradient is scaled down to it."""
    warm_up: Count = 2
    """Number of steps in which the learning rate grows."""
    versions: tuple[str, ...] = tuple(RECIPES)
    """Versions to run."""


class EpochBatches(Batches):
    """Batches from shuffled epochs: batch t is positions tB to (t+1)B of the endless order of samples.

    Each rank cuts its part into M micro-batches. M is the same on all ranks, so that with `sync` their
    messages match; some micro-batches may be empty. The last quarter of the batch's first sample is padding,
    so the ranks have different numbers of targets.
    """

    options: StepOptions

    def __post_init__(self) -> None:
        super().__post_init__()
        o, held = self.options, (len(self.text.train) - 1) // self.options.sequence
        if not 1 <= o.samples <= held:
            raise UsageError(
                f"--samples {o.samples}: {self.text.name} has 1 to {held} samples of --sequence {o.sequence}"
            )

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """Return (tokens_BS, targets_BS) of each micro-batch."""
        o = self.options
        lo, hi = (step * o.batch + at for at in rank_slice(o.batch, self.group.rank, self.group.size))
        pieces = np.array_split(samples_at(o.seed, o.samples, lo, hi), o.micro_batches)
        batches = [lm_samples(self.text.train, piece, o.sequence) for piece in pieces]
        if lo == step * o.batch:
            batches[0][1][0, o.sequence - o.sequence // 4 :] = PADDING
        return [(tokens.to(self.device), targets.to(self.device)) for tokens, targets in batches]


@contextmanager
def sync_each(dp: DataParallel) -> Iterator[None]:
    """All-reduce the gradients after this micro-batch as well, in place of no_sync().

    Each rank keeps 1/n of the sum, so that the next all-reduce counts the sum once.
    """
    yield
    dp.finish()
    for p in dp.parameters:
        if p.grad is not None:
            p.grad /= dp.group.size


def rate_factor(t: int, warm_up: int, steps: int) -> float:
    """Return the learning rate of step t as a fraction of the full rate.

    The fractions are 1/(W+1), 2/(W+1), ... 1 with W = warm_up, then a cosine down to LOWEST. t counts steps
    of the optimizer, not micro-batches. The rate depends on t alone, so there is no state to save.
    """
    if t < warm_up:
        return (t + 1) / (warm_up + 1)
    done = (t - warm_up) / max(1, steps - warm_up)
    return LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * done)) / 2


def scheduled(make: MakeOptimizer, tensors: list[Tensor], o: StepOptions, first: int = 0) -> Optimizer:
    """Return an optimizer that sets its learning rate before each step. first: number of its first step."""
    optimizer, at = make(tensors), itertools.count(first)

    def set_rate(optimizer: Optimizer, *_: object) -> None:
        factor = rate_factor(next(at), o.warm_up, o.steps)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    optimizer.register_step_pre_hook(set_rate)
    return optimizer


def scheduled_by_torch(make: MakeOptimizer, tensors: list[Tensor], o: StepOptions) -> Optimizer:
    """Return make(tensors) with the same schedule, composed of torch's schedulers."""
    optimizer = make(tensors)
    up = LinearLR(optimizer, 1 / (o.warm_up + 1), total_iters=o.warm_up)
    down = CosineAnnealingLR(
        optimizer, max(1, o.steps - o.warm_up), eta_min=LOWEST * optimizer.param_groups[0]["initial_lr"]
    )
    both = SequentialLR(optimizer, [up, down], [o.warm_up])
    optimizer.register_step_post_hook(lambda *_: both.step())
    return optimizer


def train(job: Job[StepOptions]) -> Iterator[Tensor]:
    """Train with what the version's recipe adds to the step; yield the loss of each global batch."""
    model, group, o, recipe = job.model, job.group, job.options, RECIPES[job.version]
    job.make_batches = EpochBatches
    if recipe.checkpoint:
        checkpoint_layers(model)
    if recipe.schedule:
        job.make_optimizer = partial(scheduled, job.make_optimizer, o=o)
    dp = DataParallel(model, group, o.bucket_mb)
    accumulate = partial(sync_each, dp) if recipe.sync_each else dp.no_sync
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with accumulate() if i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
                loss = loss_sum / count
                loss.backward()
            losses.append(loss.detach())
        dp.finish()
        if recipe.clip:
            clip_gradients(model.parameters(), job.mesh, o.clip)
        optimizer.step()
        yield total(losses, group)


def train_by_torch(job: Job[StepOptions]) -> Iterator[Tensor]:
    """Train likewise by torch's DDP, clipping and schedulers; on one device, the reference, without DDP."""
    model, group, o, recipe = job.model, job.group, job.options, RECIPES[job.version]
    job.make_batches = EpochBatches
    ddp: Any = model
    if group.size > 1:
        checkpoint_layers(model)
        ddp = DistributedDataParallel(model, process_group=group.pg, bucket_cap_mb=o.bucket_mb)
    if recipe.schedule:
        job.make_optimizer = partial(scheduled_by_torch, job.make_optimizer, o=o)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with ddp.no_sync() if group.size > 1 and i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(ddp(tokens_BS), targets_BS)
                loss = loss_sum / count
                (loss * group.size).backward()  # DDP divides by the number of ranks
            losses.append(loss.detach())
        if recipe.clip:
            nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        yield total(losses, group)


def step_bytes(name: str, model: nn.Module, group: Group, o: StepOptions) -> Fraction:
    """Return the bytes a rank sends in a step.

    `sync` sends the gradients and flags M - 1 times more than a plain step, our clipping the norm.
    """
    recipe, parameters = RECIPES[name], list(model.parameters())
    gradients = (sum(p.numel() for p in parameters) + len(parameters)) * parameters[0].element_size()
    more = (o.micro_batches - 1) * gradients * recipe.sync_each + 8 * (recipe.clip and not recipe.library)
    return basic_step(name, model, group, o) + Fraction(2 * (group.size - 1) * more, group.size)


def epoch_of(samples: int, ranks: int, seed: int) -> dict[str, Indices]:
    """Return the samples that all ranks together see in an epoch, by our sampler and by torch's."""
    ours = [samples_at(seed, samples, *rank_slice(samples, r, ranks)) for r in range(ranks)]
    seen = {"ours": np.concatenate(ours)}
    data = TensorDataset(torch.arange(samples))
    for drop in (False, True):
        theirs: list[DistributedSampler[Any]] = [
            DistributedSampler(data, ranks, r, seed=seed, drop_last=drop) for r in range(ranks)
        ]
        name = "DistributedSampler" + ", drop_last" * drop
        seen[name] = np.array([i for sampler in theirs for i in sampler], np.int64)
    return seen


def sampler_table(o: StepOptions, ranks: int) -> Table:
    """Count, for each sampler, the samples that an epoch sees once, repeats and leaves out."""
    title = f"an epoch of {o.samples} samples on {ranks} ranks"
    table = make_table(title, ("sampler", ">seen once", ">seen again", ">never seen"))
    for name, seen in epoch_of(o.samples, ranks, o.seed).items():
        times = np.bincount(seen, minlength=o.samples)
        table.add_row(name, *(str(int(n.sum())) for n in (times == 1, times > 1, times == 0)))
    return table


VERSIONS = {name: train_by_torch if recipe.library else train for name, recipe in RECIPES.items()}
LESSON = Lesson("dp", VERSIONS, step_bytes, basic_start, one_device=train_by_torch, unseen=("ddp",))


def main(rt: Runtime, o: StepOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, tuple(RECIPES), o)
    EpochBatches(o, rt.world, rt.device)  # checks the sizes of the batch and the data set
    if not 1 <= o.warm_up < o.steps:
        raise UsageError(
            f"--warm-up {o.warm_up} --steps {o.steps}: at least 1 step must warm up and 1 come after it; "
            f"--warm-up 1 --steps {max(2, o.steps)} would do"
        )
    if o.benchmark:
        return time_in_turn(rt, o, LESSON)
    console(rt).print(sampler_table(o, rt.world_size))
    return prove(rt, o, LESSON)


if __name__ == "__main__":
    run(main, StepOptions)
