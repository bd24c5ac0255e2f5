"""Museum of silent bugs, all dimensions: errors in the combination of strategies that are each right.

For each bug the broken version runs first and must be caught, then the right one must pass. The check is
equality with one device in loss, gradients, norm and weights, and of replicas bit for bit. `pytest -s
tests/test_museum_hybrid.py` prints the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from museum import Found, tour
from torch import nn
from training_runs import on_one_device

from common import comm
from common.comm import Group, Pending
from common.comm.mesh import Mesh
from common.comm.placement import gradient_axes, placement, sum_tied_gradients
from common.errors import RankError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Difference, Followed, compare, unequal_replicas, watch
from common.models.configs import CONFIGS, gpt2, mixtral

from hybrid_layout import HybridOptions
from hybrid_model import Hybrid
from hybrid_training import make_job, train

CONFIGS["museum-moe"] = mixtral(layers=2, width=16, heads=4, kv_heads=2, mlp_width=12, sequence=16, experts=4)
CONFIGS["museum-tied"] = gpt2(layers=2, width=16, heads=2, sequence=16)
MOE = dict(model="museum-moe", batch=8, sequence=16, steps=3, clip=0.5)
TIED = dict(model="museum-tied", batch=12, sequence=16, steps=3)
right = Hybrid.finish


def experts_over_ep(hybrid: Hybrid) -> None:
    """Broken: sums expert gradients over ep, too, along which ranks hold different experts."""
    right(hybrid)
    for p in hybrid.parameters():
        if "ep" in placement(p):
            comm.all_reduce(p.grad, hybrid.mesh.group("ep"))


def norm_of_replicas(parameters: list[nn.Parameter], mesh: Mesh, _: Any) -> torch.Tensor:
    """Broken: adds up the squares of every rank, so that a replicated parameter counts once per replica."""
    total = sum(p.grad.double().square().sum() for p in parameters)
    comm.all_reduce(total, mesh.world)
    return total.sqrt()


def norm_of_rank_0(parameters: list[nn.Parameter], mesh: Mesh, _: Any) -> torch.Tensor:
    """Broken: adds up along pp and tp, as for a dense model: experts of other ranks along ep are missing."""
    total = torch.zeros((), dtype=torch.float64)
    for p in parameters:
        total += p.grad.double().square().sum() / (1 if "tp" in placement(p) else mesh.shape["tp"])
    comm.all_reduce(total, mesh.group("pp", "tp"))
    return total.sqrt()


def norm_of_a_stage(parameters: list[nn.Parameter], mesh: Mesh, _: Any) -> torch.Tensor:
    """Broken: each stage clips by the norm of its own layers, as torch's clip_grad_norm_ would."""
    total = torch.zeros((), dtype=torch.float64)
    for p in parameters:
        copies = 1
        for axis in ("dp", "ep", "sp", "tp"):
            copies *= 1 if axis in placement(p) else mesh.shape[axis]
        total += p.grad.double().square().sum() / copies
    comm.all_reduce(total, mesh.group("dp", "ep", "sp", "tp"))
    return total.sqrt()


def mean_of_means(hybrid: Hybrid) -> None:
    """Broken: averages dense gradients over dp and ep, experts' over dp alone, as two libraries would."""
    right(hybrid)
    for p in hybrid.parameters():
        p.grad /= hybrid.mesh.group(*gradient_axes(p)).size


def tied_first(hybrid: Hybrid) -> None:
    """Broken: sums a tied head's gradient over its two holders before the sum over samples."""
    sum_tied_gradients(hybrid.model.parameters())
    hybrid.zero.finish()


def tied_never(hybrid: Hybrid) -> None:
    """Broken: each holder of a tied head steps with its own partial gradient."""
    hybrid.zero.finish()


def routers_complete(parameter: nn.Parameter, axis: str) -> None:
    """Broken: takes router gradients for complete along tp, where each rank has a slice of the output."""


FINISH, NORM = "hybrid_model.Hybrid.finish", "common.comm.placement.gradient_norm"
ROUTERS = "hybrid_experts.split_tokens_along"
Broken = dict[str, Callable[..., Any]]  # what is replaced, and by what
EXHIBITS: dict[str, tuple[dict[str, Any], Broken]] = {
    "expert gradients summed over ep": (MOE | dict(dp=2, ep=2), {FINISH: experts_over_ep}),
    "gradients averaged, each over its own ranks": (MOE | dict(dp=2, ep=2), {FINISH: mean_of_means}),
    "the norm counts replicas": (MOE | dict(dp=2, ep=2), {NORM: norm_of_replicas}),
    "the norm misses experts": (MOE | dict(ep=2, tp=2), {NORM: norm_of_rank_0}),
    "each stage clips by its own norm": (MOE | dict(pp=2, tp=2), {NORM: norm_of_a_stage}),
    "routers taken for complete along tp": (MOE | dict(ep=2, tp=2), {ROUTERS: routers_complete}),
    "a tied head's gradient is not summed": (TIED | dict(pp=2, dp=2), {FINISH: tied_never}),
    "right on dp and ep": (MOE | dict(dp=2, ep=2), {}),
    "right on ep and tp": (MOE | dict(ep=2, tp=2), {}),
    "right on pp and tp": (MOE | dict(pp=2, tp=2), {}),
    "right, a tied head": (TIED | dict(pp=2, dp=2), {}),
}


@functools.cache
def plain(rt: Runtime, model: str, optimizer: str) -> Followed:
    """Train on one device, once for all exhibits of a model."""
    return on_one_device(rt, HybridOptions(**(MOE if model == MOE["model"] else TIED)), optimizer)


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    given, broken = EXHIBITS[name]
    o = HybridOptions(**given)
    mesh = o.mesh(rt)
    job = make_job(rt, o, mesh, OPTIMIZERS[optimizer], o.steps)
    with ExitStack() as stack:
        for target, replacement in broken.items():
            stack.enter_context(patch(target, replacement))
        followed = watch(train(job), job, mesh)
    mesh.close()
    return compare(plain(rt, o.model, optimizer), followed)


def caught(name: str, found: Found) -> None:
    assert all(max(d.value for d in differences.values()) > 1e-6 for differences in found.values())


visited, test_exhibit = tour(visit, EXHIBITS, caught, ranks=lambda name: 4)


def in_a_ring(x: torch.Tensor, group: Group, *_: object, **__: object) -> Pending:
    """Sum x over the ranks, each part of the message in an order of its own: part i starts at rank i."""
    every_nN, n = comm.all_gather(x.detach().reshape(1, -1), group), group.size
    parts = [part.roll(-i, 0) for i, part in enumerate(every_nN.tensor_split(n, 1))]
    x.copy_(torch.cat([functools.reduce(torch.add, part) for part in parts]).view_as(x))
    return Pending("all_reduce", group, 0)


def drift(rt: Runtime, finish: Callable[[Hybrid], None], own_unit: bool) -> list[str]:
    """Return the replicas of a tied head that differ after some steps on 2 stages and 3 replicas.

    own_unit: the head's gradient shares no message with others, as dp_unit.py has it.
    """
    o = HybridOptions(**TIED, pp=2, dp=3)
    mesh = o.mesh(rt)
    job = make_job(rt, o, mesh, OPTIMIZERS["adamw"], o.steps)
    with (
        patch.object(Hybrid, "finish", finish),
        patch("common.comm.placement.comm.all_reduce", in_a_ring),
        patch("dp_unit.hasattr", lambda *of: own_unit and hasattr(*of), create=True),
    ):
        watch(train(job), job, mesh)
    assert job.owner
    return unequal_replicas(job.owner.named_parameters(), mesh)


def test_a_tied_head_that_is_summed_first_drifts_apart() -> None:
    """The head equals one device to 1e-12, but its replicas drift apart: rounding depends on the layout."""
    assert spawn(drift, 6, tied_first, False)[0] == ["embed_tokens.weight"]
    assert spawn(drift, 6, right, False)[0] == []
    assert spawn(drift, 6, tied_first, True)[0] == []


def only_some(rt: Runtime) -> None:
    """Broken: makes groups on their members only; other ranks skip the call, and store names disagree."""
    if rt.rank < 2:
        Mesh(rt.world, dp=2, tp=2, timeout=3).group("tp")
    else:
        Mesh(rt.world, dp=2, tp=2, timeout=3).group("dp")


def test_groups_made_by_only_some_ranks_are_named() -> None:
    with pytest.raises(RankError) as error:
        spawn(only_some, 4)
    assert "_make" in str(error.value) or "new_group" in str(error.value)
