"""Targets of the gathered keys: values, gradients, attention against one device, bytes, tensors kept.

B batch  H heads  s tokens of this rank  S tokens of all ranks  K width of a head  R ranks
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group
from common.grade.targets import backpropagate, counted, exactly, same, share, target
from common.utils.memory import saved_bytes


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def uneven(group: Group) -> list[int]:
    """Return the tokens of each rank: 4, 1, 3, ..."""
    return [4, 1, 3, 2][: group.size]


@target("all ranks have the keys of all tokens", ranks=(1, 2, 3))
def values(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Pieces of equal and of unequal length."""
    for sizes in ([3] * group.size, uneven(group)):
        x_BHSK = draw(rng, 2, 3, sum(sizes), 5)
        pieces = x_BHSK.split(sizes, 2)
        own = pieces[group.rank].clone()
        mistakes = {
            "this rank's keys alone": own,
            "joined in the order of the ranks reversed": torch.cat(pieces[::-1], 2),
            "this rank's keys in the place of every rank": torch.cat([own] * group.size, 2),
        }
        same(f"keys of pieces of {sizes} tokens", mine.gather_keys(own, list(sizes), group), x_BHSK, mistakes)


@target("the gradient of a key is the sum of the terms of all ranks", ranks=(1, 2, 3))
def gradients(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Every rank has another gradient of the gathered keys."""
    for sizes in ([3] * group.size, uneven(group)):
        x_BHSK, dy_RBHSK = draw(rng, 2, 3, sum(sizes), 5), draw(rng, group.size, 2, 3, sum(sizes), 5)
        x = x_BHSK.split(sizes, 2)[group.rank].clone().requires_grad_()
        dy, summed = dy_RBHSK[group.rank], dy_RBHSK.sum(0)
        backpropagate("the gathered keys", mine.gather_keys(x, list(sizes), group), dy.clone())
        mistakes = {
            "the slice of this rank's own term: the queries of the other ranks read these keys, too": dy,
            "the mean of the terms, not their sum": dy_RBHSK.mean(0),
            "n times this rank's own term": group.size * dy,
        }
        of_own_keys = {name: whole.split(sizes, 2)[group.rank] for name, whole in mistakes.items()}
        right = summed.split(sizes, 2)[group.rank]
        same(f"the gradient of this rank's keys of {sizes} tokens", x.grad, right, of_own_keys)


@target("causal attention has the result and gradients of one device", ranks=(2, 3))
def attention(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Own queries with gathered keys and values; the loss is the sum of the ranks' losses."""
    sizes = uneven(group)
    whole = [draw(rng, 2, 3, sum(sizes), 5).requires_grad_() for _ in range(3)]
    weights = draw(rng, 2, 3, sum(sizes), 5)
    o_BHSK = F.scaled_dot_product_attention(*whole, is_causal=True)
    (o_BHSK * weights).sum().backward()
    q, k, v = (x.detach().split(sizes, 2)[group.rank].clone().requires_grad_() for x in whole)
    seen_sS = torch.ones(sum(sizes), sum(sizes), dtype=torch.bool).tril().split(sizes)[group.rank]
    keys, values = (mine.gather_keys(x, list(sizes), group) for x in (k, v))
    o_BHsK = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen_sS)
    same("attention of this rank's queries", o_BHsK, o_BHSK.split(sizes, 2)[group.rank])
    backpropagate("attention", o_BHsK, weights.split(sizes, 2)[group.rank])
    for name, got, want in zip(("queries", "keys", "values"), (q, k, v), whole, strict=True):
        same(f"the gradient of this rank's {name}", got.grad, want.grad.split(sizes, 2)[group.rank])


@target("one all-gather forward, one reduce-scatter backward", ranks=(2, 3))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Calls and bytes of each pass, for pieces of equal length: unequal ones travel padded."""
    x = draw(rng, 2, 3, 4, 5).requires_grad_()
    with counted("all_gather") as forward:
        y = mine.gather_keys(x, [4] * group.size, group)
    with counted("reduce_scatter") as backward:
        backpropagate("the gathered keys", y, torch.ones_like(y))
    for direction, ledger in (("forward", forward), ("backward", backward)):
        exactly(f"calls in the {direction} pass", len(ledger.rows), 1)
        exactly(f"bytes sent in the {direction} pass", ledger.bytes(), share(1, group.size * x.nbytes, group))


@target("no tensor is kept for the backward pass", ranks=(2,))
def kept(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The backward pass of a linear function needs no values."""
    x = draw(rng, 2, 3, 4, 5).requires_grad_()
    held = saved_bytes(lambda: mine.gather_keys(x, [4] * group.size, group), nn.Module())
    exactly("bytes that autograd keeps for the backward pass", held, 0)
