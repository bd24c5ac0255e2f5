"""Museum of silent bugs, a split sequence: each bug trains without a crash, and every shape is right.

For each bug the broken version runs first and must be caught, then the right one must pass. The check is
equality with one device in every gradient and weight; `pytest -s tests/test_museum_sp.py` prints the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from museum import UNSEEN, Found, tour
from steps import follow
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import sum_gradients
from common.launch.runtime import Runtime
from common.lesson.equality import Difference, Followed, compare
from common.lesson.training import Batches, make_model
from common.models.transformer import Transformer, cross_entropy_sum

from sp_block import KERNELS
from sp_ring_attention import Passing, RingAttention
from sp_sequence_parallel import ORDERS, sequence_parallel
from sp_split import split_sequence
from sp_training import SequenceOptions

ALONE = Group.alone()
OPTIONS = SequenceOptions(model="llama-tiny", batch=2, micro_batches=1, sequence=24, steps=3)


class FirstKeysAgain(RingAttention):
    """Broken: the forward pass is right, the backward pass uses this rank's own keys in all ring steps."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, o, lse), (causal, group, _, kernel) = ctx.saved_tensors, ctx.rest
        (do,), r, n = gradients, group.rank, group.size
        dq, own_dk, own_dv = kernel.backward(do, q, o, lse, k, v, causal)
        dkv, spare = (torch.zeros(2, *k.shape, dtype=k.dtype) for _ in range(2))
        for t in range(1, n):
            if (r - t) % n < r:
                more, dk, dv = kernel.backward(
                    do, q, o, lse, k, v, False
                )  # k, v: should be those of rank r - t
                dq += more
                dkv += torch.stack((dk, dv))
            dkv, spare = Passing(dkv, spare, group, tag=1).wait()
        return dq, own_dk + dkv[0], own_dv + dkv[1], None, None, None, None


def first_keys_again(model: Transformer, group: Group) -> None:
    """Give every layer a ring whose backward pass forgets to receive keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return FirstKeysAgain.apply(q, k, v, causal, group, "contiguous", KERNELS["library"])

    for layer in model.layers:
        layer.attention.attend = attend


def from_zero(positions_s: Tensor) -> Tensor:
    """Broken: numbers each rank's tokens from 0."""
    return torch.arange(len(positions_s))


def mean_of_means(here: int, everywhere: int, ranks: int) -> float:
    """Broken: divides by the rank's own number of targets, and by the number of ranks."""
    return 1 / (max(here, 1) * ranks)


def contiguous_positions(positions_s: Tensor, group: Group) -> Tensor:
    """Broken: returns the rank's positions in contiguous order."""
    return torch.arange(len(positions_s)) + group.rank * len(positions_s)


@dataclass
class Recipe:
    """A way to train on a split sequence: attention, set-up, positions and the scale of the loss."""

    attention: str = "ring"
    set_up: Callable[[Transformer, Group], None] = lambda model, group: None
    positions: Callable[[Tensor, Group], Tensor] = lambda positions_s, group: positions_s
    scale: Callable[[int, int, int], float] = lambda here, everywhere, ranks: 1 / everywhere


EXHIBITS = {
    "the ring that goes back with the first keys": Recipe(set_up=first_keys_again),
    "positions that restart on every rank": Recipe(
        positions=lambda positions_s, group: from_zero(positions_s)
    ),
    "the mean of means": Recipe(scale=mean_of_means),
    "zigzag without its positions": Recipe("zigzag", positions=contiguous_positions),
    "right": Recipe(),
    "right, zigzag": Recipe("zigzag"),
}


def padded(step: int) -> tuple[Tensor, Tensor]:
    """Return a batch whose samples end early: the last rank has few targets."""
    ((tokens_BS, targets_BS),) = Batches(OPTIONS, ALONE, torch.device("cpu")).parts(step)
    return tokens_BS, targets_BS.index_fill(1, torch.arange(15, 24), -100)


def train(model: Transformer, recipe: Recipe, group: Group, mesh: Mesh | None) -> Callable[[int], Tensor]:
    """Return the training step of `recipe`; without a mesh, on one device."""
    if mesh:
        sequence_parallel(model, group, recipe.attention)
        recipe.set_up(model, group)

    def step(t: int) -> Tensor:
        tokens_Bs, positions_s, targets_Bs = split_sequence(*padded(t), group, ORDERS[recipe.attention])
        count = targets_Bs.ne(-100).sum()
        here = int(count.item())
        comm.all_reduce(count, group)
        total, _ = cross_entropy_sum(model(tokens_Bs, recipe.positions(positions_s, group)), targets_Bs)
        loss = total * recipe.scale(here, int(count.item()), group.size)
        loss.backward()
        if mesh:
            sum_gradients(model.parameters(), mesh)
        shown = loss.detach().clone()
        comm.all_reduce(shown, group)
        return shown

    return step


@cache
def one_device(optimizer: str) -> Followed:
    """Train on one device, once for all exhibits."""
    model = make_model(OPTIONS, torch.device("cpu"))
    return follow(model, optimizer, OPTIONS.steps, train(model, Recipe(), ALONE, None))


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    model, mesh = make_model(OPTIONS, rt.device), Mesh(rt.world, sp=rt.world_size)
    step = train(model, EXHIBITS[name], mesh.group("sp"), mesh)
    return compare(one_device(optimizer), follow(model, optimizer, OPTIONS.steps, step, mesh))


def caught(name: str, found: Found) -> None:
    assert found["sgd"]["gradients"].value > 1e-3
    assert found["sgd"]["weights"].value > 1e-6
    assert found["adamw"]["loss"].value < UNSEEN


visited, test_exhibit = tour(visit, EXHIBITS, caught)
