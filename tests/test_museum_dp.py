"""Museum of silent bugs, data parallelism: each bug trains without a crash, and all have been shipped.

For each bug the broken version runs first and must be caught, then the right one must pass. The check is
equality with one device in every gradient and weight. `pytest -s tests/test_museum_dp.py` prints the
differences, also of the loss, which looks right for most bugs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from museum import UNSEEN, Found, show, tour
from steps import follow
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Difference, Followed, compare
from common.lesson.training import Batches, make_model
from common.models.transformer import cross_entropy_sum

from dp_basic import DataParallel, all_reduce_gradients, broadcast_model
from dp_training import DataParallelOptions

ALONE = Group.alone()
# 7 samples on 2 ranks: 3 and 4
OPTIONS = DataParallelOptions(model="gpt2-tiny", batch=7, micro_batches=2, sequence=12, steps=3)


@dataclass
class Recipe:
    """A way to synchronise: the set-up, the scale of a loss sum, and the call after the backward pass."""

    set_up: Callable[[nn.Module, Group], None] = lambda model, group: None
    scale: Callable[[int, int, int], float] = lambda here, everywhere, ranks: 1 / everywhere
    finish: Callable[[nn.Module, Group], None] = all_reduce_gradients


def clip(model: nn.Module, group: Group) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.05)


# The last micro-batch is announced to hooks that synchronise in it.
in_last = {"now": False}


def hook_on_the_parameter(model: nn.Module, group: Group) -> None:
    """Broken: averages weights: a hook of `register_post_accumulate_grad_hook` gets the parameter."""

    def hook(p: Tensor) -> None:
        if in_last["now"]:
            comm.all_reduce(p.data, group, "avg")

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)


def hook_on_the_last_gradient(model: nn.Module, group: Group) -> None:
    """Broken: keeps accumulated gradients local: a hook of `register_hook` gets this backward's alone."""

    def hook(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        if in_last["now"]:
            comm.all_reduce(total, group)
        return total

    for p in model.parameters():
        p.register_hook(hook)


def clip_then_reduce(model: nn.Module, group: Group) -> None:
    clip(model, group)
    all_reduce_gradients(model, group)


def reduce_then_clip(model: nn.Module, group: Group) -> None:
    all_reduce_gradients(model, group)
    clip(model, group)


NOTHING: Callable[[nn.Module, Group], None] = lambda model, group: None  # noqa: E731
EXHIBITS = {
    "the hook that averages weights": Recipe(hook_on_the_parameter, finish=NOTHING),
    "the hook that sees the last micro-batch": Recipe(hook_on_the_last_gradient, finish=NOTHING),
    "the mean of means": Recipe(scale=lambda here, everywhere, ranks: 1 / (here * ranks)),
    "the clip before the reduction": Recipe(finish=clip_then_reduce),
    "right": Recipe(),
    "right, clipped": Recipe(finish=reduce_then_clip),
}


def train(model: nn.Module, recipe: Recipe, batches: Batches, group: Group) -> Callable[[int], Tensor]:
    """Return the training step of `recipe`."""
    recipe.set_up(model, group)

    def step(t: int) -> Tensor:
        parts = batches.parts(t)
        targets = torch.tensor(sum(y.numel() for _, y in parts))
        here = int(targets.item())
        comm.all_reduce(targets, group)
        everywhere, loss = int(targets.item()), torch.zeros((), dtype=torch.float64)
        for i, (x, y) in enumerate(parts):
            in_last["now"] = i == len(parts) - 1
            total, _ = cross_entropy_sum(model(x), y)
            (total * recipe.scale(here, everywhere, group.size)).backward()
            loss += total.detach()
        recipe.finish(model, group)
        comm.all_reduce(loss, group)
        return loss / everywhere

    return step


@cache
def one_device(clipped: bool, optimizer: str) -> Followed:
    """Train on one device, once for all exhibits."""
    model = make_model(OPTIONS, torch.device("cpu"))
    batches = Batches(replace(OPTIONS, micro_batches=1), ALONE, torch.device("cpu"))
    step = train(model, Recipe(finish=clip if clipped else NOTHING), batches, ALONE)
    return follow(model, optimizer, OPTIONS.steps, step)


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    model = make_model(OPTIONS, rt.device)
    broadcast_model(model, rt.world)
    step = train(model, EXHIBITS[name], Batches(OPTIONS, rt.world, rt.device), rt.world)
    parallel = follow(model, optimizer, OPTIONS.steps, step, Mesh(rt.world, dp=rt.world_size))
    return compare(one_device("clip" in name, optimizer), parallel)


def caught(name: str, found: Found) -> None:
    assert found["sgd"]["gradients"].value > 1e-3
    assert found["sgd"]["weights"].value > 1e-5
    if "hook" not in name:
        assert found["adamw"]["loss"].value < UNSEEN


visited, test_exhibit = tour(visit, EXHIBITS, caught)


def factor(rt: Runtime, times: float) -> Found:
    """Return, per optimizer, the effect of gradients that are too large by the factor `times`.

    This is the classic bug. AdamW hides it, so every comparison must include SGD.
    """
    found = {}
    for optimizer in OPTIMIZERS:
        runs = []
        for scale in (1.0, times):
            model = make_model(OPTIONS, rt.device)
            dp = DataParallel(model, rt.world)
            recipe = Recipe(
                scale=lambda here, everywhere, ranks, scale=scale: scale / everywhere,
                finish=lambda model, group, dp=dp: dp.finish(),
            )
            batches = Batches(replace(OPTIONS, micro_batches=1), rt.world, rt.device)
            step = train(model, recipe, batches, rt.world)
            runs.append(follow(model, optimizer, OPTIONS.steps, step, Mesh(rt.world, dp=rt.world_size)))
        found[optimizer] = compare(*runs)
    return found


def test_adamw_alone_hides_a_constant_factor() -> None:
    found = spawn(factor, 2, 8.0)[0]
    show("gradients 8 times too large", found)
    # AdamW alone sees the factor only through epsilon; SGD by the factor itself, step after step
    assert found["sgd"]["weights"].value > 20 * found["adamw"]["weights"].value
    assert found["adamw"]["gradients"].value > 1
