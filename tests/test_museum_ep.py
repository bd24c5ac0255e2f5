"""Museum of silent bugs, expert parallelism: each bug trains without a crash, and all have been shipped.

For each bug the broken version runs first and must be caught, then the right one must pass. The check is
equality with one device in every gradient and weight; `pytest -s tests/test_museum_ep.py` prints the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from unittest.mock import patch

import torch
from museum import Found, tour
from steps import Run, Version, follow, training_step
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import placement, sum_gradients
from common.launch.runtime import Runtime
from common.lesson.equality import Difference, Followed, compare
from common.lesson.training import Batches, make_model
from common.models import moe as plain_moe
from common.models.configs import CONFIGS, mixtral
from common.models.moe import MoE, Routing, combine, pick
from common.models.transformer import Transformer, cross_entropy_sum

from ep_load_balance import Balance, BalanceOptions
from ep_moe import expert_parallel, with_capacity
from ep_training import load

CONFIGS["museum-mixtral"] = mixtral(
    layers=2, width=16, heads=2, kv_heads=1, mlp_width=12, sequence=8, experts=4
)
OPTIONS = BalanceOptions(
    model="museum-mixtral",
    batch=5,
    sequence=8,
    steps=3,
    micro_batches=2,
    capacity_factor=0.7,
    coefficient=0.1,
)
Finish = Callable[[Transformer, Mesh], None]


def rule(model: Transformer, mesh: Mesh) -> None:
    """Synchronise gradients as the right version does."""
    sum_gradients(model.parameters(), mesh)


def dense_averaged_experts_left(model: Transformer, mesh: Mesh) -> None:
    """Broken: each loss is a mean over the rank's samples, as in DDP; only dense gradients are averaged.

    An expert, however, sees the tokens of all ranks: its gradient is the sum of n means.
    """
    sum_gradients(model.parameters(), mesh)
    for p in model.parameters():
        if "ep" not in placement(p):
            p.grad /= mesh.shape["ep"]


def as_for_ddp(model: Transformer, mesh: Mesh) -> None:
    """Average dense gradients, and divide the experts' by n as well: right."""
    dense_averaged_experts_left(model, mesh)
    for p in model.parameters():
        if "ep" in placement(p):
            p.grad /= mesh.shape["ep"]


def experts_summed_too(model: Transformer, mesh: Mesh) -> None:
    """Broken: takes experts for replicas, and sums the gradients of different experts."""
    rule(model, mesh)
    for p in model.parameters():
        if "ep" in placement(p):
            comm.all_reduce(p.grad, mesh.group("ep"))


def weighted_twice(self: MoE, x_BSD: Tensor) -> Tensor:
    """Broken: applies the weights twice: to the rows sent to the experts, and in the sum of the results."""
    routing = self.router(x_BSD)
    plan = self.plan(routing.experts_BSK)
    weights_TK = routing.weights_BSK.flatten(0, 1)
    rows_RD = pick(x_BSD.flatten(0, 1), plan.token_R, plan.full)
    order_R = plan.row_TK.flatten().argsort()
    rows_RD = rows_RD * weights_TK.flatten()[order_R][:, None]
    y_TKD = pick(self.compute(rows_RD, plan.counts_E), plan.row_TK, plan.full)
    return combine(y_TKD, weights_TK).view_as(x_BSD)


def capacity_of_the_flat_batch(experts_BSK: Tensor, E: int, factor: float) -> plain_moe.Plan:
    """Broken: one capacity for all samples of a rank: the dropped tokens depend on how the batch is split."""
    return plan_capacity(experts_BSK.flatten(0, 1)[None], E, factor)


plan_capacity = plain_moe.plan_capacity


class OfEachMicroBatch(Balance):
    """Broken: computes the balance loss per micro-batch, and adds up these losses."""


class OfEachRank(Balance):
    """Broken: computes the balance loss per rank on its own tokens; then gradients are summed."""

    def loss(self) -> Tensor | float:
        self.group = Group.alone()
        return super().loss()


def run_of(balance: Balance) -> Run:
    """Return forward and backward of a step's micro-batches, with the loss of `balance`."""

    def run(parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        total = parts[0][-1].new_zeros((), dtype=balance.model.norm.weight.dtype)
        for i, (*inputs, targets_BS) in enumerate(parts):
            begin(i)
            total = total + cross_entropy_sum(balance.model(*inputs), targets_BS)[0]
            if i == len(parts) - 1 or isinstance(balance, OfEachMicroBatch):
                total = total + balance.loss() / scale
        (total * scale).backward()
        return total.detach()

    return run


class WithoutTheDropped(Balance):
    """Broken: counts only choices within capacity, so that no expert's count exceeds its capacity."""

    def counts(self, layers: list[list[Routing]]) -> Tensor:
        E, factor = 4, OPTIONS.capacity_factor
        of_layers = []
        for routings in layers:
            served = torch.zeros(2, E, dtype=torch.int64)
            for r in routings:
                plan, experts_TK = plan_capacity(r.experts_BSK, E, factor), r.experts_BSK.flatten(0, 1)
                kept_TK = plan.row_TK < len(plan.token_R)
                served[0] += load(experts_TK[kept_TK], E)
                served[1] += load(experts_TK[:, 0], E)
            of_layers.append(served)
        return torch.stack(of_layers)


@dataclass
class Recipe:
    """A bug: a patch that holds while the model runs, and the call after the backward pass."""

    broken: Callable[[], AbstractContextManager[object]] = nullcontext
    finish: Finish = rule
    averages: bool = False
    version: str = "dropless"
    balance: type[Balance] | None = None  # by its loss


EXHIBITS = {
    "auxiliary loss times micro-batches": Recipe(balance=OfEachMicroBatch),
    "auxiliary loss times ranks": Recipe(balance=OfEachRank),
    "dropped tokens left out of the load": Recipe(balance=WithoutTheDropped, version="capacity"),
    "expert gradients times ep": Recipe(finish=dense_averaged_experts_left, averages=True),
    "experts taken for replicas": Recipe(finish=experts_summed_too),
    "combine weights before and after": Recipe(partial(patch.object, MoE, "forward", weighted_twice)),
    "capacity of whatever a rank has": Recipe(
        partial(patch.object, plain_moe, "plan_capacity", capacity_of_the_flat_batch), version="capacity"
    ),
    "right": Recipe(),
    "right, as for DDP": Recipe(finish=as_for_ddp, averages=True),
    "right, with capacity": Recipe(version="capacity"),
    "right, auxiliary loss": Recipe(balance=Balance),
    "right, auxiliary loss with capacity": Recipe(balance=Balance, version="capacity"),
}


@cache
def one_device(name: str, balanced: bool, optimizer: str) -> Followed:
    """Train on one device, once for all exhibits."""
    model, alone = make_model(OPTIONS, torch.device("cpu")), Group.alone()
    with_capacity(name, model, OPTIONS)
    batches = Batches(replace(OPTIONS, micro_batches=1), alone, torch.device("cpu"))
    version = Version(model, run=run_of(Balance("switch", model, alone, OPTIONS)) if balanced else None)
    return follow(model, optimizer, OPTIONS.steps, training_step(version, batches, alone))


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    recipe, mesh = EXHIBITS[name], Mesh(rt.world, ep=rt.world_size)
    o, model = OPTIONS, make_model(OPTIONS, rt.device)
    expert_parallel(model, mesh.group("ep"))
    with_capacity(recipe.version, model, o)
    made = run_of(recipe.balance("switch", model, rt.world, o)) if recipe.balance else None
    finish = partial(recipe.finish, model, mesh)
    version = Version(model, finish=finish, averages=recipe.averages, run=made)
    with recipe.broken():
        step = training_step(version, Batches(o, rt.world, rt.device), rt.world)
        followed = follow(model, optimizer, o.steps, step, mesh)
    return compare(one_device(recipe.version, recipe.balance is not None, optimizer), followed)


def caught(name: str, found: Found) -> None:
    assert all(differences["gradients"].value > 1e-3 for differences in found.values())
    assert found["sgd"]["weights"].value > 1e-5


visited, test_exhibit = tour(visit, EXHIBITS, caught)
