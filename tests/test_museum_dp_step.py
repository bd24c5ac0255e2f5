"""Museum of silent bugs in a training step: each bug trains without a crash, and all have been shipped.

As in tests/test_museum_dp.py, the broken version runs first and must be caught, then the right one must pass.
`pytest -s tests/test_museum_dp_step.py` prints the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from museum import UNSEEN, Found, show, tour
from steps import Version, Wrap, follow, plain, training_step
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler, TensorDataset

from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import clip_gradients
from common.data.sampler import samples_at
from common.data.text import lm_samples, rank_slice
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Difference, Followed, compare
from common.lesson.training import Batches, make_model

from dp_accumulation import (
    EpochBatches,
    StepOptions,
    rate_factor,
    scheduled,
    scheduled_by_torch,
)
from dp_basic import DataParallel
from dp_loss_scaling import LossScaler, by_torch, train, train_by_torch
from dp_precision_proof import Scales, ScalingOptions, finite, overflowing
from dp_training import on_one_device, on_ranks

ALONE = Group.alone()
# an epoch of 7 samples on 2 ranks: 3 and 4, where a padded sampler takes 4 and 4
OPTIONS = StepOptions(samples=7, batch=7, sequence=12, steps=4, micro_batches=2, clip=0.3, warm_up=1)


@dataclass
class Exhibit:
    """An exhibit's changes to a step that accumulates, and the one-device version it is compared with."""

    batches: type[Batches] = EpochBatches
    clip_each: bool = False
    clip: bool = False
    wrap: Wrap = plain
    like: str = "plain"


class SeededByRank(EpochBatches):
    """Broken: each rank shuffles with its own seed, and takes its part of its own order."""

    def parts(self, step: int) -> list[tuple[Tensor, Tensor]]:
        mine = EpochBatches(
            replace(self.options, seed=self.options.seed + self.group.rank), self.group, self.device
        )
        return mine.parts(step)


class PaddedEnd(EpochBatches):
    """Broken: torch's DistributedSampler on the same order: it repeats samples to make parts equal."""

    def parts(self, step: int) -> list[tuple[Tensor, Tensor]]:
        o = self.options
        order = samples_at(o.seed, o.samples, step * o.batch, (step + 1) * o.batch)
        sampler: Any = DistributedSampler(
            TensorDataset(torch.from_numpy(order)), self.group.size, self.group.rank, shuffle=False
        )
        mine = np.array([order[i] for i in sampler])
        return [lm_samples(self.text.train, p, o.sequence) for p in np.array_split(mine, o.micro_batches)]


def stepped_in_each(make: Any, tensors: list[Tensor]) -> Optimizer:
    """Broken: the scheduler steps once per micro-batch: M times a step."""
    optimizer = make(tensors)
    rates = LambdaLR(optimizer, lambda t: rate_factor(t, OPTIONS.warm_up, OPTIONS.steps))

    def after(*_: object) -> None:
        for _ in range(OPTIONS.micro_batches):
            rates.step()

    optimizer.register_step_post_hook(after)
    return optimizer


EXHIBITS = {
    "a seed for each rank": Exhibit(SeededByRank),
    "the padded end": Exhibit(PaddedEnd),
    "the clip of each micro-batch": Exhibit(clip_each=True, clip=True, like="clipped"),
    "the scheduler in each micro-batch": Exhibit(wrap=stepped_in_each, like="scheduled"),
    "right": Exhibit(),
    "right, clipped": Exhibit(clip=True, like="clipped"),
    "right, scheduled": Exhibit(wrap=partial(scheduled, o=OPTIONS), like="scheduled"),
}


@contextmanager
def clipped(model: nn.Module, dp: DataParallel) -> Iterator[None]:
    """Broken: clips after each micro-batch, by the norm of this rank's gradients so far."""
    with dp.no_sync():
        yield
    nn.utils.clip_grad_norm_(model.parameters(), OPTIONS.clip)


@cache
def one_device(like: str, optimizer: str) -> Followed:
    model = make_model(OPTIONS, torch.device("cpu"))

    def finish() -> None:
        if like == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), OPTIONS.clip)

    batches = EpochBatches(replace(OPTIONS, micro_batches=1), ALONE, torch.device("cpu"))
    step = training_step(Version(model, finish=finish), batches, ALONE)
    wrap = partial(scheduled_by_torch, o=OPTIONS) if like == "scheduled" else plain
    return follow(model, optimizer, OPTIONS.steps, step, wrap=wrap)


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    exhibit, mesh = EXHIBITS[name], Mesh(rt.world, dp=rt.world_size)
    model = make_model(OPTIONS, rt.device)
    dp = DataParallel(model, rt.world)

    def finish() -> None:
        dp.finish()
        if exhibit.clip:
            clip_gradients(model.parameters(), mesh, OPTIONS.clip)

    version = Version(model, partial(clipped, model, dp) if exhibit.clip_each else dp.no_sync, finish)
    step = training_step(version, exhibit.batches(OPTIONS, rt.world, rt.device), rt.world)
    followed = follow(model, optimizer, OPTIONS.steps, step, mesh, exhibit.wrap)
    return compare(one_device(exhibit.like, optimizer), followed)


def caught(name: str, found: Found) -> None:
    assert found["sgd"]["weights"].value > 1e-3
    assert found["adamw"]["loss"].value < UNSEEN


visited, test_exhibit = tour(visit, EXHIBITS, caught)


def epochs_of_seeds(seeded_by_rank: bool, ranks: int) -> list[int]:
    """Return the count of each of 1000 samples in an epoch."""
    parts = [
        samples_at(rank if seeded_by_rank else 0, 1000, *rank_slice(1000, rank, ranks))
        for rank in range(ranks)
    ]
    return np.bincount(np.concatenate(parts), minlength=1000).tolist()


def test_a_seed_for_each_rank_loses_samples() -> None:
    """With a seed per rank, 8 ranks each draw 1/8 in their own order: (7/8)^8, a third, is never seen."""
    wrong, right = epochs_of_seeds(True, 8), epochs_of_seeds(False, 8)
    print(
        f"\na seed for each of 8 ranks, 1000 samples: {wrong.count(0)} never seen, {sum(n > 1 for n in wrong)} again"
    )
    assert 250 < wrong.count(0) < 450
    assert set(right) == {1}


SCALING = ScalingOptions(batch=8, sequence=8, steps=5, overflow=2)


def scaled(rt: Runtime, group: str) -> tuple[list[float], Found]:
    """Train ZeRO-2 with a scaler that asks all ranks or its own only; return scales and differences."""
    found, deciding = {}, rt.world if group == "all" else ALONE
    for optimizer in OPTIMIZERS:
        scales: Scales = []
        zero2 = (train, lambda _: LossScaler(deciding, SCALING.scale, SCALING.interval))
        mine, *_ = on_ranks(
            rt, SCALING, partial(overflowing, version=zero2, scales=scales), "zero2", optimizer
        )
        reference = partial(overflowing, version=(train_by_torch, by_torch), scales=[])
        alone = on_one_device(rt, replace(SCALING, micro_batches=1), reference, "one device", optimizer)
        found[optimizer] = compare(finite(alone), finite(mine))
    return [scale for scale, _ in scales], found


def test_a_scaler_that_skips_on_one_rank_only() -> None:
    (first, found), (second, _) = spawn(scaled, 2, "own")
    print(f"\nscales of rank 0 {first}, of rank 1 {second}", end="")
    show("the scaler that skips on one rank", found)
    assert first != second  # rank 0 skipped, rank 1 stepped
    assert found["adamw"]["loss"].value < UNSEEN
    assert found["sgd"]["gradients"].value > 0.3
    assert found["sgd"]["weights"].value > 0.1


def test_a_scaler_that_asks_all_ranks() -> None:
    results = spawn(scaled, 2, "all")
    show("right, scaled", results[0][1])
    for factors, found in results:
        assert factors == results[0][0]
        assert max(d.value for d in found["sgd"].values()) < 32 * 2.0**-11


def own_pieces(rt: Runtime) -> tuple[list[float], list[float]]:
    """Return the scales of torch's scaler and of ours if only rank 1 has a shard that overflows."""
    theirs, ours = torch.amp.GradScaler(rt.device.type, 8.0, growth_interval=9), LossScaler(rt.world, 8.0, 9)
    scales: list[list[float]] = [[], []]
    for scaler, factors in zip((theirs, ours), scales, strict=True):
        piece = nn.Parameter(torch.ones(2))
        optimizer = OPTIMIZERS["sgd"]([piece])
        for t in range(3):
            optimizer.zero_grad()
            factors.append(scaler.get_scale())
            scaler.scale(piece.sum()).backward()
            if rt.rank == t == 1:
                piece.grad = torch.full_like(piece, torch.inf)
            if scaler is theirs:
                theirs.step(optimizer)
                theirs.update()
            elif ours.unscale(optimizer):
                optimizer.step()
    return scales[0], scales[1]


def test_torchs_scaler_looks_at_its_own_rank() -> None:
    assert spawn(own_pieces, 2) == [([8, 8, 8], [8, 8, 4]), ([8, 8, 4], [8, 8, 4])]
