"""Museum of silent bugs, tensor parallelism: each bug trains without a crash, and all have been shipped.

For each bug the broken version runs first and must be caught, then the right one must pass. The check is
equality with one device in every gradient and weight; `pytest -s tests/test_museum_tp.py` prints the numbers.
The loss of the first step is right in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from museum import Found, tour
from steps import Version, follow, training_step
from torch import Tensor

from common import comm
from common.comm import Group, collectives
from common.comm.mesh import Mesh
from common.comm.placement import gradient_norm, sum_gradients
from common.launch.runtime import Runtime
from common.lesson.equality import Difference, Followed, compare
from common.lesson.training import Batches, make_model
from common.models.configs import CONFIGS, llama
from common.models.transformer import Transformer

from tp_megatron import MegatronOptions, SharedRows, tensor_parallel

CONFIGS["museum-llama"] = llama(layers=2, width=32, heads=4, kv_heads=1, mlp_width=44, sequence=16)
OPTIONS = MegatronOptions(model="gpt2-tiny", batch=3, sequence=8, steps=3)
MAX_NORM = 0.05
ALONE = Mesh(Group.alone())
Finish = Callable[[Transformer, Mesh], None]


def rule(model: Transformer, mesh: Mesh) -> None:
    """Synchronise gradients as the right version does."""
    sum_gradients(model.parameters(), mesh)


def clip(model: Transformer, norm: float) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= min(1.0, MAX_NORM / norm)


def clip_by_the_norm(model: Transformer, mesh: Mesh) -> None:
    rule(model, mesh)
    clip(model, gradient_norm(model.parameters(), mesh).item())


def clip_by_all_squares(model: Transformer, mesh: Mesh) -> None:
    """Broken: sums the squares of all ranks, so that replicated norms and biases count more than once."""
    rule(model, mesh)
    squares = torch.stack([p.grad.double().square().sum() for p in model.parameters() if p.grad is not None])
    total = squares.sum()
    comm.all_reduce(total, mesh.group("tp"))
    clip(model, total.sqrt().item())


def nothing(model: Transformer, mesh: Mesh) -> None: ...


@contextmanager
def averaged_activations() -> Iterator[None]:
    """Broken: averages an activation over ranks in place, for a plot, once the layer has used it."""
    plain = F.gelu

    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        y = plain(x, approximate=approximate)
        comm.all_reduce(x.data, current["group"], "avg")  # gelu saved x for its backward pass
        return y

    with patch.object(F, "gelu", gelu):
        yield


def unsummed_heads(self: SharedRows, x_BSD: Tensor) -> Tensor:
    """Broken: uses rows of the shared weight without summing its gradient over the ranks that share it."""
    return F.linear(x_BSD, self.weight[self.rows])


def summed_again(x: Tensor, group: Group) -> Tensor:
    """Broken: an all-reduce as its own adjoint: right for a loss per rank, here n times too large."""
    return collectives.linear_map(
        x, lambda x: collectives._summed(x, group), lambda dy: collectives._summed(dy, group)
    )


current: dict[str, Group] = {}


@dataclass
class Recipe:
    """A bug: a patch that holds while the model runs, and the call after the backward pass."""

    broken: Callable[[], AbstractContextManager[object]] = nullcontext
    finish: Finish = rule
    sequence_parallel: bool = False
    model: str = "gpt2-tiny"
    clipped: bool = False


EXHIBITS = {
    "the missing f": Recipe(partial(patch.object, collectives, "copy", lambda x, group: x)),
    "the sum that is summed again": Recipe(partial(patch.object, collectives, "reduce", summed_again)),
    "the all-reduce on what autograd saved": Recipe(averaged_activations),
    "norms that drift apart": Recipe(finish=nothing, sequence_parallel=True),
    "the norm that counts norms n times": Recipe(finish=clip_by_all_squares, clipped=True),
    "shared heads, not summed": Recipe(
        partial(patch.object, SharedRows, "forward", unsummed_heads), model="museum-llama"
    ),
    "right": Recipe(),
    "right, sequence parallel": Recipe(sequence_parallel=True),
    "right, clipped": Recipe(finish=clip_by_the_norm, clipped=True),
    "right, shared heads": Recipe(model="museum-llama"),
}


@cache
def one_device(model_name: str, clipped: bool, optimizer: str) -> Followed:
    """Train on one device, once for all exhibits."""
    o = replace(OPTIONS, model=model_name)
    model = make_model(o, torch.device("cpu"))
    version = Version(model, finish=partial(clip_by_the_norm, model, ALONE) if clipped else lambda: None)
    step = training_step(version, Batches(o, ALONE.world, torch.device("cpu")), ALONE.world)
    return follow(model, optimizer, o.steps, step)


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    recipe, mesh = EXHIBITS[name], Mesh(rt.world, tp=rt.world_size)
    current["group"] = mesh.group("tp")
    reference, o = one_device(recipe.model, recipe.clipped, optimizer), replace(OPTIONS, model=recipe.model)
    model = make_model(o, rt.device)
    tensor_parallel(model, mesh.group("tp"), recipe.sequence_parallel)
    version = Version(model, finish=partial(recipe.finish, model, mesh), loss=model.loss)
    step = training_step(version, Batches(o, ALONE.world, rt.device), ALONE.world)
    with recipe.broken():
        followed = follow(model, optimizer, o.steps, step, mesh)
    assert abs(reference.losses[0] - followed.losses[0]) < 1e-12
    return compare(reference, followed)


def caught(name: str, found: Found) -> None:
    assert all(differences["weights"].value > 1e-4 for differences in found.values())


visited, test_exhibit = tour(visit, EXHIBITS, caught)
