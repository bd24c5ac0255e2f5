"""Museum of silent bugs, sharded states: each bug trains without a crash. See test_museum_dp.py.

`pytest -s tests/test_museum_dp_zero.py` prints the differences to one device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from museum import UNSEEN, show
from steps import Version, training_step
from torch import Tensor

from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import gradient_norm
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Difference, compare, follow
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


def visit(rt: Runtime, name: str, stage: int) -> dict[str, dict[str, Difference]]:
    """Return the exhibit's differences from one device, for each optimizer."""
    mesh, alone, found = Mesh(rt.world, dp=rt.world_size), Group.alone(), {}
    norms: dict[str, tuple[Norm, Norm]] = {
        "the norm of a shard": (norm_of_shards, norm_of_shards),
        "right, clipped": (norm_of_shards, gradient_norm),
    }
    norm, norm_of_all = norms.get(name, (None, None))
    for optimizer in OPTIMIZERS:
        model = make_model(OPTIONS, rt.device)
        step = clipped_step(Version(model), alone, norm, mesh)
        reference = follow(model, optimizer, OPTIONS.steps, step)
        model = make_model(OPTIONS, rt.device)
        zero = (Forgets if "forgotten" in name else Zero)(model, model.layers, mesh.group("dp"), stage)
        if name == "reduced twice":
            for unit in zero.units:
                unit.__class__ = KeepsGradients
        version = Version(model, zero.no_sync if stage == 1 else nullcontext, zero.finish, owner=zero)
        step = clipped_step(version, rt.world, norm_of_all, mesh)
        found[optimizer] = compare(reference, follow(zero, optimizer, OPTIONS.steps, step, mesh))
    return found


@pytest.mark.parametrize(
    ("name", "stage"),
    [("reduced twice", 2), ("the norm of a shard", 1), ("the gather that was forgotten", 2)],
)
def test_caught(name: str, stage: int) -> None:
    found = spawn(visit, 2, name, stage)[0]
    show(name, found)
    assert found["sgd"]["gradients"].value > 1e-3
    assert found["sgd"]["weights"].value > 1e-5
    assert found["adamw"]["loss"].value < UNSEEN


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["right", "right, clipped"])
def test_right(name: str, stage: int) -> None:
    for found in spawn(visit, 2, name, stage):
        show(name, found)
        for differences in found.values():
            assert max(d.value for d in differences.values()) <= 1e-12
