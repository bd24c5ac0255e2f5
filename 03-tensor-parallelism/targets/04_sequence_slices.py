"""Targets of sequence parallelism: enter and leave with adjoints, a block against one device, bytes, activations kept.

B samples  S tokens, s of this rank's slice  D width  F hidden features, f of this rank
"""

from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, sizes_of
from common.grade.targets import at_most, backpropagate, counted, exactly, holds, same, target
from common.utils.memory import saved_bytes

B, S, D, HIDDEN = 2, 7, 4, 12


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def part(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part of a tensor along `dim`."""
    return x.split(sizes_of(x.shape[dim], group.size), dim)[group.rank]


@target("enter gathers the slices, leave sums and cuts", ranks=(1, 2, 3))
def values(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Forward passes on a sequence that does not divide."""
    x_BSD, x_RBSD = draw(rng, B, S, D), draw(rng, group.size, B, S, D)
    same("enter(x)", mine.enter(part(x_BSD, 1, group).clone(), group, S), x_BSD)
    own = part(x_RBSD[group.rank], 1, group)
    mistakes = {"the slice of this rank's own term: nothing was added": own}
    same("leave(x)", mine.leave(x_RBSD[group.rank].clone(), group), part(x_RBSD.sum(0), 1, group), mistakes)


@target("the gradient of enter is summed and cut, that of leave gathered", ranks=(1, 2, 3))
def adjoints(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Gradients that differ from rank to rank."""
    dy_RBSD, dy_BSD = draw(rng, group.size, B, S, D), draw(rng, B, S, D)
    x_BsD = part(draw(rng, B, S, D), 1, group).clone().requires_grad_()
    backpropagate("enter(x)", mine.enter(x_BsD, group, S), dy_RBSD[group.rank].clone())
    mistakes = {
        "the slice of this rank's own gradient: the terms of the other ranks are missing": part(
            dy_RBSD[group.rank], 1, group
        )
    }
    same("the gradient of x through enter", x_BsD.grad, part(dy_RBSD.sum(0), 1, group), mistakes)
    x_BSD = draw(rng, B, S, D).requires_grad_()
    backpropagate("leave(x)", mine.leave(x_BSD, group), part(dy_BSD, 1, group).clone())
    lone_BSD = torch.zeros(B, S, D, dtype=torch.float64)
    part(lone_BSD, 1, group).copy_(part(dy_BSD, 1, group))
    mistakes = {"zero but for this rank's slice: gather the gradients of the others": lone_BSD}
    same("the gradient of x through leave", x_BSD.grad, dy_BSD, mistakes)


def layers(rng: torch.Generator) -> list[nn.Module]:
    """Return [norm, up, down], whole, with random parameters."""
    found = [nn.LayerNorm(D), nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)]
    for layer in found:
        layer.double()
        for p in layer.parameters():
            p.data = draw(rng, *p.shape)
    return found


def shards(whole: list[nn.Module], group: Group) -> list[nn.Module]:
    """Return [norm, up, down] of this rank."""
    f = sizes_of(HIDDEN, group.size)[group.rank]
    norm, up, down = found = nn.LayerNorm(D), nn.Linear(D, f), nn.Linear(f, D)
    norm.weight.data, norm.bias.data = (p.data.clone() for p in whole[0].parameters())
    up.weight.data, up.bias.data = (part(p.data, 0, group).clone() for p in whole[1].parameters())
    down.weight.data, down.bias.data = (
        part(whole[2].weight.data, 1, group).clone(),
        whole[2].bias.data.clone(),
    )
    return list(found)


def one_device(whole: list[nn.Module], x_BSD: Tensor) -> Tensor:
    """Return x + mlp(norm(x))."""
    norm, up, down = whole
    return x_BSD + down(F.gelu(up(norm(x_BSD))))


@target("y and the gradient of x are those of one device", ranks=(1, 2, 3))
def block(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Slices of both."""
    whole, x_BSD, dy_BSD = layers(rng), draw(rng, B, S, D).requires_grad_(), draw(rng, B, S, D)
    y_BSD = one_device(whole, x_BSD)
    y_BSD.backward(dy_BSD)
    own = part(x_BSD.detach(), 1, group).clone().requires_grad_()
    y_BsD = mine.Block(*shards(whole, group), group)(own, S)
    right, bias_D = part(y_BSD, 1, group), whole[2].bias
    mistakes = {
        f"right but for the bias, which was added {group.size} times": right + (group.size - 1) * bias_D,
        "right but for the bias, which is missing": right - bias_D,
        "right but for x, which is to be added": right - own,
    }
    same("y", y_BsD, right, mistakes)
    backpropagate("y", y_BsD, part(dy_BSD, 1, group).clone())
    same("the gradient of x", own.grad, part(x_BSD.grad, 1, group))


@target("after sum_gradients, the gradients of all parameters are those of one device", ranks=(1, 2, 3))
def parameters(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Those of shards are complete as they are, the others have been summed."""
    whole, x_BSD, dy_BSD = layers(rng), draw(rng, B, S, D), draw(rng, B, S, D)
    one_device(whole, x_BSD).backward(dy_BSD)
    module = mine.Block(*shards(whole, group), group)
    backpropagate("y", module(part(x_BSD, 1, group).clone(), S), part(dy_BSD, 1, group).clone())
    before = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    for name, right, dim in (
        ("down.weight", whole[2].weight.grad, 1),
        ("up.weight", whole[1].weight.grad, 0),
        ("up.bias", whole[1].bias.grad, 0),
    ):
        same(f"the gradient of {name}", before[name], part(right, dim, group))
    module.sum_gradients()
    for name in ("down.weight", "up.weight", "up.bias"):
        kept = torch.equal(module.get_parameter(name).grad, before[name])
        holds(kept, f"sum_gradients changes the gradient of {name}, a shard, which is complete without it")
    for full, grad in (
        ("down.bias", whole[2].bias.grad),
        ("norm.weight", whole[0].weight.grad),
        ("norm.bias", whole[0].bias.grad),
    ):
        mistakes = {} if before[full] is None else {"that of this rank's tokens alone": before[full]}
        same(f"the gradient of {full}", module.get_parameter(full).grad, grad, mistakes)


@target("each pass sends the bytes of one all-reduce", ranks=(2, 3))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """A sequence that divides; the parameters' gradients apart."""
    n, length = group.size, 6
    module = mine.Block(*shards(layers(rng), group), group)
    x_BsD = part(draw(rng, B, length, D), 1, group).clone().requires_grad_()
    with counted("all_gather", "reduce_scatter") as forward:
        y = module(x_BsD, length)
    with counted("all_gather", "reduce_scatter") as backward:
        backpropagate("y", y, torch.ones_like(x_BsD))
    for direction, ledger in (("forward", forward), ("backward", backward)):
        all_reduce = Fraction(2 * (n - 1) * 8 * B * length * D, n)
        exactly(f"bytes that it sends in the {direction} pass", ledger.bytes(), all_reduce)
    with counted("all_reduce") as after:
        module.sum_gradients()
    exactly("bytes that sum_gradients sends", after.bytes(), Fraction(2 * (n - 1) * 8 * 3 * D, n))


@target("(D + 2)/n + D + 2 f numbers per token are kept for the backward pass", ranks=(2, 3))
def kept(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The norm's input, mean and deviation of a slice; the gathered input; hidden features before and after gelu."""
    length, f = 6, sizes_of(HIDDEN, group.size)[group.rank]
    module = mine.Block(*shards(layers(rng), group), group)
    x_BsD = part(draw(rng, B, length, D), 1, group).clone().requires_grad_()
    numbers = B * length * (Fraction(D + 2, group.size) + D + 2 * f)
    at_most(
        "bytes kept for the backward pass",
        saved_bytes(lambda: module(x_BsD, length), module),
        int(8 * numbers),
    )
