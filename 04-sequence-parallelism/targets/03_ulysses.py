"""Targets of Ulysses: both swaps with their gradients, attention against one device, bytes.

B batch  H heads  h = H / n heads of this rank  s tokens of this rank  S tokens of all ranks  K width of a head
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group
from common.grade.targets import at_most, backpropagate, counted, exactly, same, share, target


def draw(rng: torch.Generator, n: int) -> Tensor:
    """Return x_BHSK with two heads per rank and three tokens per rank; all lengths differ on 2 to 4 ranks."""
    return torch.randn(2, 2 * n, 3 * n, 5, generator=rng, dtype=torch.float64)


def piece(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's contiguous piece: heads (dimension 1) or tokens (2)."""
    return x.chunk(group.size, dim)[group.rank]


def strided(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return every n-th head or token, this rank's: a typical mistake."""
    return x.unflatten(dim, (-1, group.size)).select(dim + 1, group.rank)


def mixed(x_BHSK: Tensor, group: Group) -> Tensor:
    """Return this rank's heads with the tokens of different ranks in turn: a typical mistake."""
    return piece(x_BHSK, 1, group).unflatten(2, (group.size, -1)).transpose(2, 3).flatten(2, 3)


def reordered(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return x cut along heads (dimension 1) or tokens (2) and joined along the other, without communication."""
    other = 3 - dim
    return x.unflatten(dim, (group.size, -1)).movedim(dim, other).flatten(other, other + 1)


@target("to_heads: own heads of all tokens, and the gradient back", ranks=(1, 2, 3))
def heads(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Every rank has another gradient."""
    x, dy = draw(rng, group.size), draw(rng, group.size)
    mistakes = {
        "every n-th head: rank j gets the heads j h to (j+1) h - 1": strided(x, 1, group),
        "in the wrong order of tokens: first token of each rank, second of each, ...": mixed(x, group),
        "this rank's tokens of all heads": piece(x, 2, group),
    }
    swap("to_heads", mine.to_heads, (x, 2), (x, 1), dy, group, mistakes)


@target("to_tokens: all heads of own tokens, and the gradient back", ranks=(1, 2, 3))
def tokens(mine: Any, group: Group, rng: torch.Generator) -> None:
    """It undoes to_heads."""
    x, dy = draw(rng, group.size), draw(rng, group.size)
    mistakes = {
        "every n-th token: those of rank r are r s to (r+1) s - 1": strided(x, 2, group),
        "in the wrong order of heads: first head of each rank, second of each, ...": piece(x, 2, group)
        .unflatten(1, (group.size, -1))
        .transpose(1, 2)
        .flatten(1, 2),
    }
    swap("to_tokens", mine.to_tokens, (x, 1), (x, 2), dy, group, mistakes)


def swap(
    name: str,
    op: Callable[[Tensor, Group], Tensor],
    given: tuple[Tensor, int],
    want: tuple[Tensor, int],
    dy: Tensor,
    group: Group,
    mistakes: dict[str, Tensor],
) -> None:
    """Compare a swap and its gradient with pieces of whole tensors; the pairs are (tensor, dimension of the split)."""
    (whole, before), (wanted, after) = given, want
    x = piece(whole, before, group).clone().requires_grad_()
    y = op(x, group)
    unsent = {
        "this rank's own numbers in another order: nothing was sent": reordered(x.detach(), after, group)
    }
    same(f"the result of {name}", y, piece(wanted, after, group), {**mistakes, **unsent})
    own = piece(dy, after, group).clone()
    backpropagate(f"the result of {name}", y, own)
    unsent = {
        "this rank's own dy in another order: the backward pass sends nothing": reordered(own, before, group)
    }
    same(f"the gradient of x through {name}", x.grad, piece(dy, before, group), unsent)


@target("attention and the gradients of q, k, v are those of one device", ranks=(1, 2, 3))
def attention(mine: Any, group: Group, rng: torch.Generator) -> None:
    """With and without causal mask."""
    for causal in (False, True):
        whole = [draw(rng, group.size).requires_grad_() for _ in range(3)]
        do = draw(rng, group.size)
        o = F.scaled_dot_product_attention(*whole, is_causal=causal)
        o.backward(do)
        own = [piece(x.detach(), 2, group).clone().requires_grad_() for x in whole]
        got = mine.ulysses(*own, causal, group)
        masked = "with" if causal else "without"
        other = F.scaled_dot_product_attention(*whole, is_causal=not causal).detach()
        alone = F.scaled_dot_product_attention(*own, is_causal=causal).detach()
        mistakes = {
            f"attention {'without' if causal else 'with'} causal mask": piece(other, 2, group),
            "attention to this rank's own tokens alone": alone,
        }
        same(f"attention {masked} causal mask", got, piece(o, 2, group), mistakes)
        backpropagate("attention", got, piece(do, 2, group))
        for name, x, right in zip("qkv", own, whole, strict=True):
            same(f"the gradient of {name} {masked} causal mask", x.grad, piece(right.grad, 2, group))


@target("(n-1)/n of q, k, v and o each way", ranks=(2, 3, 4))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Calls and bytes of each pass."""
    own = [piece(draw(rng, group.size), 2, group).clone().requires_grad_() for _ in range(3)]
    with counted("all_to_all") as forward:
        o = mine.ulysses(*own, True, group)
    with counted("all_to_all") as backward:
        backpropagate("attention", o, torch.ones_like(o))
    for direction, ledger in (("forward", forward), ("backward", backward)):
        exactly(f"bytes sent in the {direction} pass", ledger.bytes(), share(4, own[0].nbytes, group))
        at_most(f"all-to-alls in the {direction} pass", len(ledger.rows), 4)
