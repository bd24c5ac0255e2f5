"""Museum of silent bugs, sharded states: each bug trains without a crash. See test_museum_dp.py.

`pytest -s tests/test_museum_dp_zero.py` prints the differences to one device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from museum import UNSEEN, Found, tour
from steps import Version, follow, training_step
from torch import Tensor

from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import gradient_norm
from common.launch.runtime import Runtime
from common.lesson.equality import Difference, Followed, compare
from common.lesson.training import Batches, make_model

from dp_training import DataParallelOptions
from dp_unit import Unit
from dp_zero import Zero

OPTIONS = DataParallelOptions(model="gpt2-tiny", batch=6, micro_batches=2, sequence=12, steps=3)
LARGEST_NORM = 0.05


class KeepsGradients(Unit):
    """Broken: keeps p.grad after its reduction: the next micro-batch adds to it, and it is sent again."""

    def fill(self, name: str) -> None:
        kept = self.parameters[name].grad.clone()
        super().fill(name)
        self.parameters[name].grad = kept


class Forgets(Zero):
    """Broken: no all-gather after the optimizer step: each rank has new weights in its own run only."""

    def _stepped(self, *_: object) -> None:
        pass


def norm_of_shards(pieces: list[Tensor], mesh: Mesh) -> Tensor:
    """Return torch.nn.utils' total norm, as clip_grad_norm_ uses it: right only for a whole model."""
    return torch.nn.utils.get_total_norm([p.grad for p in pieces if p.grad is not None])


Norm = Callable[[list[Tensor], Mesh], Tensor]


def clipped_step(version: Version, group: Group, norm: Norm | None, mesh: Mesh) -> Callable[[int], Tensor]:
    """Return the training step, with its gradients clipped by `norm` if one is given."""
    step = training_step(version, Batches(OPTIONS, group, torch.device("cpu")), group)

    def clipped(t: int) -> Tensor:
        loss = step(t)
        if norm:
            factor = (LARGEST_NORM / norm(version.parameters, mesh)).clamp(max=1.0)
            for p in version.parameters:
                p.grad = None if p.grad is None else p.grad * factor
        return loss

    return clipped


@dataclass
class Exhibit:
    """A stage of ZeRO, its class and that of its units, and the norm of all shards if gradients are clipped."""

    stage: int
    zero: type[Zero] = Zero
    unit: type[Unit] = Unit
    norm: Norm | None = None


EXHIBITS = {
    "reduced twice": Exhibit(2, unit=KeepsGradients),
    "the norm of a shard": Exhibit(1, norm=norm_of_shards),
    "the gather that was forgotten": Exhibit(2, Forgets),
    "right, stage 1": Exhibit(1),
    "right, stage 3": Exhibit(3),
    "right, clipped, stage 1": Exhibit(1, norm=gradient_norm),
    "right, clipped, stage 3": Exhibit(3, norm=gradient_norm),
}


@cache
def one_device(clipped: bool, optimizer: str) -> Followed:
    """Train on one device, once for all exhibits."""
    model, alone = make_model(OPTIONS, torch.device("cpu")), Group.alone()
    step = clipped_step(Version(model), alone, norm_of_shards if clipped else None, Mesh(alone))
    return follow(model, optimizer, OPTIONS.steps, step)


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    exhibit, mesh = EXHIBITS[name], Mesh(rt.world, dp=rt.world_size)
    model = make_model(OPTIONS, rt.device)
    zero = exhibit.zero(model, model.layers, mesh.group("dp"), exhibit.stage)
    for unit in zero.units:
        unit.__class__ = exhibit.unit
    version = Version(model, zero.no_sync if exhibit.stage == 1 else nullcontext, zero.finish, owner=zero)
    step = clipped_step(version, rt.world, exhibit.norm, mesh)
    followed = follow(zero, optimizer, OPTIONS.steps, step, mesh)
    return compare(one_device(exhibit.norm is not None, optimizer), followed)


def caught(name: str, found: Found) -> None:
    assert found["sgd"]["gradients"].value > 1e-3
    assert found["sgd"]["weights"].value > 1e-5
    assert found["adamw"]["loss"].value < UNSEEN


visited, test_exhibit = tour(visit, EXHIBITS, caught)
