"""Targets of ZeRO-1: weights of one device, 1/n of the state, bytes of an all-reduce."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.comm import Group
from common.grade.targets import OPTIMIZERS, at_most, counted, exactly, holds, same, share, target

ALLOWED = {"torch.optim"}
D, H, C, B = 5, 7, 3, 4  # sizes of the layers, samples per rank
Weights = list[dict[str, Tensor]]  # by step, then by the parameter's name


def network(seed: int) -> nn.Module:
    """Return two layers, 66 parameters in 4 tensors; most numbers of ranks divide neither."""
    model, rng = (
        nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C)),
        torch.Generator().manual_seed(seed),
    )
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=rng, dtype=torch.float64)
    return model


def backward(model: nn.Module, x_BD: Tensor, samples: int) -> None:
    """Run the backward pass of these samples' part of the mean over all samples."""
    (model(x_BD).square().sum() / samples).backward()


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all weights by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def on_one_device(
    seed: int, x_SBD: Tensor, samples: int, make: Callable[..., Optimizer], keep_state: bool = True
) -> Weights:
    """Return the weights after each step on one device; the batch of a step is x_BD."""
    model, found = network(seed), []
    optimizer = make(model.parameters())
    for x_BD in x_SBD:
        optimizer = optimizer if keep_state else make(model.parameters())
        model.zero_grad()
        backward(model, x_BD, samples)
        optimizer.step()
        found.append(copied(model))
    return found


def by_shard(weights: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return weights of which the r-th shard comes from weights[r]."""
    n, first = len(weights), weights[0]
    flats = [torch.cat([x.flatten() for x in of.values()]) for of in weights]
    joined = torch.cat([whole.tensor_split(n)[r] for r, whole in enumerate(flats)])
    pieces = joined.split([x.numel() for x in first.values()])
    return {name: piece.view_as(x) for (name, x), piece in zip(first.items(), pieces, strict=True)}


def compare(mine: Any, group: Group, rng: torch.Generator, optimizer: str, steps: int) -> None:
    """Compare the weights after each step with those of one device."""
    make, seed = OPTIMIZERS[optimizer], int(torch.randint(10**6, (1,), generator=rng))
    x_SRBD = torch.randn(steps, group.size, B, D, generator=rng, dtype=torch.float64)
    all_SBD, n, samples = x_SRBD.flatten(1, 2), group.size, group.size * B
    right = on_one_device(seed, all_SBD, samples, make)
    begun = [copied(network(seed)), *right]
    mistakes: dict[str, Weights] = {
        "as before the step": begun,
        "updated in this rank's shard alone; the new weights of the others are missing": [
            by_shard([new if r == group.rank else old for r in range(n)])
            for old, new in zip(begun, right, strict=False)
        ],
        "updated with the gradient of one rank, not with the sum": [
            by_shard(list(weights))
            for weights in zip(
                *(on_one_device(seed, x_SRBD[:, r], samples, make) for r in range(n)), strict=True
            )
        ],
        "updated with the mean over the ranks of the gradients, not their sum": on_one_device(
            seed, all_SBD, samples * n, make
        ),
        "updated by an optimizer that has lost its state: make it once": on_one_device(
            seed, all_SBD, samples, make, keep_state=False
        ),
    }
    model = network(seed)
    zero = mine.Zero1(model, group, make)
    for step, weights in enumerate(right):
        model.zero_grad()
        backward(model, x_SRBD[step, group.rank], samples)
        zero.step()
        for name, p in model.named_parameters():
            looks_like = {mistake: by_step[step][name] for mistake, by_step in mistakes.items()}
            same(f"{name} after step {step + 1} of {optimizer}", p, weights[name], looks_like)


@target("the weights of one device after a step of SGD", ranks=(1, 2, 3, 4))
def a_step(mine: Any, group: Group, rng: torch.Generator) -> None:
    """66 parameters on 4 ranks: shards of 17, 17, 16 and 16."""
    compare(mine, group, rng, "SGD", 1)


@target("after three steps of AdamW and of SGD", ranks=(1, 2, 3, 4))
def three_steps(mine: Any, group: Group, rng: torch.Generator) -> None:
    """AdamW's state must last from step to step."""
    compare(mine, group, rng, "AdamW", 3)
    compare(mine, group, rng, "SGD", 3)


def a_step_of(mine: Any, group: Group, rng: torch.Generator) -> list[Optimizer]:
    """Take a step; return the optimizers that were made for it."""
    model, made = network(1), []

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        made.append(OPTIMIZERS["AdamW"](parameters))
        return made[-1]

    zero = mine.Zero1(model, group, make)
    backward(model, torch.randn(B, D, generator=rng, dtype=torch.float64), B)
    zero.step()
    return made


@target("state of 2Ψ/n numbers", ranks=(2, 3, 4))
def the_state(mine: Any, group: Group, rng: torch.Generator) -> None:
    """In float64 each number has 8 bytes. One number more per parameter tensor is padding."""
    made, parameters = a_step_of(mine, group, rng), list(network(1).parameters())
    exactly("optimizers made", len(made), 1)
    kept = [
        x for state in made[0].state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()
    ]
    holds(bool(kept), "the optimizer has no state: its step() must update the shard")
    most = Fraction(sum(p.numel() for p in parameters), group.size) + len(parameters)
    at_most("bytes of AdamW's state on this rank", sum(x.nbytes for x in kept), int(16 * most))


@target("a reduce-scatter and an all-gather", ranks=(2, 3, 4))
def the_bytes(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The bytes of an all-reduce; n numbers more per parameter tensor are padding."""
    with counted("reduce_scatter", "all_gather") as ledger:
        a_step_of(mine, group, rng)
    parameters = list(network(1).parameters())
    most = 8 * (sum(p.numel() for p in parameters) + group.size * len(parameters))
    for call in ("reduce_scatter", "all_gather"):
        at_most(f"bytes that it sends by {call}", ledger.bytes(call), share(1, most, group))
