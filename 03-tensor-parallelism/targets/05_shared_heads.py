"""Targets of shared key-value heads: heads held, values, gradients with the sum over those that share, bytes.

B samples  S tokens  D width  K width of a head  H query heads  G key-value heads; h, g of this rank
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group
from common.grade.targets import at_most, backpropagate, counted, exactly, holds, same, target
from common.utils.memory import LiveBytes

ALLOWED = {"common.comm.collectives"}
B, S, D, K = 2, 4, 5, 2
HEADS = {1: [(4, 2)], 2: [(4, 2), (4, 1)], 4: [(8, 2), (4, 4), (8, 1)]}  # by ranks: (H, G)
NAMES = ("q_hKD", "k_gKD", "v_gKD", "o_hKD")


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def cases(group: Group, rng: torch.Generator) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield a name and [q_HKD, k_GKD, v_GKD, o_HKD] for each number of heads."""
    for H, G in HEADS[group.size]:
        weights = [draw(rng, heads, K, D).requires_grad_() for heads in (H, G, G, H)]
        yield f"H = {H}, G = {G}", weights


def mine_of(weight: Tensor, group: Group) -> Tensor:
    """Return this rank's heads of a weight or of its gradient."""
    heads, n = len(weight), group.size
    begin = group.rank * heads // n
    return weight[begin : begin + max(heads // n, 1)]


def one_device(weights: list[Tensor], x_BSD: Tensor) -> Tensor:
    """Return attention with all heads."""
    *inputs, o_HKD = weights
    q, k, v = (torch.einsum("bsd,hkd->bhsk", x_BSD, w) for w in inputs)
    y_BHSK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return torch.einsum("bhsk,hkd->bsd", y_BHSK, o_HKD)


@target("each rank holds its heads and nothing else", ranks=(1, 2, 4))
def held(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Values, memory of their own, no other parameters, buffers and hidden copies."""
    for case, weights in cases(group, rng):
        with LiveBytes() as live:
            module = mine.SharedAttention(*weights, group)
        found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        needed, names = 0, ", ".join(found) or "none"
        for name, weight in zip(NAMES, weights, strict=True):
            holds(name in found, f"there is no parameter {name}; the module has {names}")
            right, got = mine_of(weight, group), found.pop(name)
            needed += right.nbytes
            first = group.rank * len(weight) // group.size
            others = {f"head {j}, not head {first}": head for j, head in enumerate(weight.split(1))}
            holds(
                got.shape != weight.shape or len(right) == len(weight), f"with {case}, {name} holds all heads"
            )
            same(f"with {case}, {name}", got, right, others)
            at_most(
                f"bytes of memory behind {name} (a view keeps all heads in memory: copy them)",
                got.untyped_storage().nbytes(),
                got.nbytes,
            )
        holds(not found, f"the module also holds {', '.join(found)}")
        at_most(f"with {case}, bytes that the module holds", live.now, needed + 128)  # 128 for indices


def own_term(weights: list[Tensor], x_BSD: Tensor, group: Group) -> Tensor:
    """Return attention with this rank's heads alone."""
    return one_device([mine_of(w.detach(), group) for w in weights], x_BSD)


def backward(
    mine: Any, weights: list[Tensor], group: Group, rng: torch.Generator
) -> tuple[Any, Tensor | None, Tensor, Tensor]:
    """Run both; return the module and the gradients of x: the exercise's, the right one, this rank's term."""
    x_BSD, dy_BSD = draw(rng, B, S, D).requires_grad_(), draw(rng, B, S, D)
    own = x_BSD.detach().clone().requires_grad_()
    module = mine.SharedAttention(*(w.detach().clone() for w in weights), group)
    (term,) = torch.autograd.grad(own_term(weights, x_BSD, group), x_BSD, dy_BSD)
    one_device(weights, x_BSD).backward(dy_BSD)
    backpropagate("y", module(own), dy_BSD)
    return module, own.grad, x_BSD.grad, term


@target("y is that of one device", ranks=(1, 2, 4))
def values(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Forward pass."""
    for case, weights in cases(group, rng):
        x_BSD = draw(rng, B, S, D)
        y_BSD = one_device(weights, x_BSD)
        mistakes = {"this rank's own term: nothing was added": own_term(weights, x_BSD, group)}
        module = mine.SharedAttention(*weights, group)
        for w in weights:
            w.data.fill_(torch.nan)  # the whole weights are not kept
        same(f"with {case}, y", module(x_BSD.clone()), y_BSD, mistakes)


@target("the gradients of x, queries and output are those of one device", ranks=(1, 2, 4))
def gradients(mine: Any, group: Group, rng: torch.Generator) -> None:
    """They are complete before `sum_gradients`, and left alone by it."""
    for case, weights in cases(group, rng):
        module, dx, right, term = backward(mine, weights, group, rng)
        mistakes = {"this rank's own term: the terms of the other ranks are missing": term}
        same(f"with {case}, the gradient of x", dx, right, mistakes)
        before = {NAMES[i]: getattr(module, NAMES[i]).grad for i in (3, 0)}
        for i in (3, 0):
            same(
                f"with {case}, the gradient of {NAMES[i]}", before[NAMES[i]], mine_of(weights[i].grad, group)
            )
        before = {name: grad.clone() for name, grad in before.items()}
        module.sum_gradients()
        for name, grad in before.items():
            kept = torch.equal(getattr(module, name).grad, grad)
            holds(
                kept,
                f"with {case}, sum_gradients changes the gradient of {name}, which is complete without it",
            )


@target("the gradients of keys and values are summed over the ranks that share them", ranks=(1, 2, 4))
def shared(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Shared by none, by pairs, by all."""
    for case, weights in cases(group, rng):
        module, *_ = backward(mine, weights, group, rng)
        before = [None if (g := getattr(module, name).grad) is None else g.clone() for name in NAMES]
        module.sum_gradients()
        for i in (2, 1):
            whole = weights[i].grad
            mistakes = {"the sum over all ranks, which also hold other heads": whole.sum(0, keepdim=True)}
            if before[i] is not None:
                mistakes["this rank's own term: the ranks that share the head have others"] = before[i]
            got = getattr(module, NAMES[i]).grad
            same(f"with {case}, the gradient of {NAMES[i]}", got, mine_of(whole, group), mistakes)


@target("one all-reduce in each pass, and one over the ranks that share", ranks=(2, 4))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Calls of both passes; bytes of all three."""
    n = group.size
    for case, weights in cases(group, rng):
        x_BSD = draw(rng, B, S, D).requires_grad_()
        module = mine.SharedAttention(*(w.detach().clone() for w in weights), group)
        with counted("all_reduce") as forward:
            y = module(x_BSD)
        with counted("all_reduce") as back:
            backpropagate("y", y, torch.ones_like(x_BSD))
        with counted("all_reduce") as after:
            module.sum_gradients()
        for direction, ledger in (("forward", forward), ("backward", back)):
            exactly(f"with {case}, all-reduces in the {direction} pass", len(ledger.rows), 1)
            whole = Fraction(2 * (n - 1) * x_BSD.nbytes, n)
            exactly(f"with {case}, bytes that it sends in the {direction} pass", ledger.bytes(), whole)
        G = len(weights[1])
        sharing, g = max(n // G, 1), max(G // n, 1)
        right = Fraction(2 * (sharing - 1) * 2 * g * K * D * 8, sharing)
        exactly(f"with {case}, bytes that sum_gradients sends", after.bytes(), right)
