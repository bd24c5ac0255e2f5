"""Targets of f and g: values, gradients, both in an MLP against one device, tensors left alone, bytes.

R ranks  N tokens  D width  F hidden features, f of this rank
"""

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, sizes_of
from common.grade.targets import backpropagate, counted, exactly, same, target, unchanged


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


@target("f(x) is x, g(x) is the sum over the ranks", ranks=(1, 2, 3))
def values(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Forward passes alone."""
    x_RND = draw(rng, group.size, 5, 3)
    own = x_RND[group.rank]
    same(
        "f(x)",
        mine.f(own.clone(), group),
        own,
        {"the sum over the ranks: f sends only backward": x_RND.sum(0)},
    )
    mistakes = {
        "this rank's own term: nothing was added": own,
        "the mean over the ranks, not the sum": x_RND.mean(0),
    }
    same("g(x)", mine.g(own.clone(), group), x_RND.sum(0), mistakes)


@target("the gradient of f is the sum over the ranks, that of g is passed on", ranks=(1, 2, 3))
def gradients(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Every rank has another gradient of f's result, and the same of g's."""
    x_RND, dy_RND = draw(rng, group.size, 5, 3), draw(rng, group.size, 5, 3)
    x, dy = x_RND[group.rank].clone().requires_grad_(), dy_RND[group.rank]
    backpropagate("f(x)", mine.f(x, group), dy.clone())
    mistakes = {"this rank's own term: the terms of the other ranks are missing": dy}
    same("the gradient of x through f", x.grad, dy_RND.sum(0), mistakes)
    x.grad = None
    backpropagate("g(x)", mine.g(x, group), dy_RND[0].clone())
    mistakes = {"the sum over the ranks: every rank has the whole gradient already": group.size * dy_RND[0]}
    same("the gradient of x through g", x.grad, dy_RND[0], mistakes)


@target("x + g(relu(f(x) A) B) has the loss and gradients of one device", ranks=(2, 3))
def together(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Uneven columns, a residual beside f and g; the gradient of sum() is an expanded tensor."""
    x, a_DF, b_FD = (w.requires_grad_() for w in (draw(rng, 5, 4), draw(rng, 4, 7), draw(rng, 7, 4)))
    (x + torch.relu(x @ a_DF) @ b_FD).sum().backward()
    sizes = sizes_of(7, group.size)
    a_Df = a_DF.detach().split(sizes, 1)[group.rank].clone().requires_grad_()
    b_fD = b_FD.detach().split(sizes, 0)[group.rank].clone().requires_grad_()
    own = x.detach().clone().requires_grad_()
    y = own + mine.g(torch.relu(mine.f(own, group) @ a_Df) @ b_fD, group)
    backpropagate("y", y.sum(), torch.ones((), dtype=torch.float64))
    same("y", y, x + torch.relu(x @ a_DF) @ b_FD)
    for name, got, want, dim in (("A", a_Df, a_DF, 1), ("B", b_fD, b_FD, 0)):
        same(f"the gradient of this rank's part of {name}", got.grad, want.grad.split(sizes, dim)[group.rank])
    same("the gradient of x", own.grad, x.grad)


@target("x and the gradient that comes in are unchanged", ranks=(2,))
def left_alone(mine: Any, group: Group, rng: torch.Generator) -> None:
    """All-reduces work on copies: other branches of the graph use the same tensors."""
    for name, op in (("f", mine.f), ("g", mine.g)):
        x = draw(rng, group.size, 5, 3)[group.rank].clone().requires_grad_()
        dy = draw(rng, group.size, 5, 3)[group.rank]
        x_before, dy_before = x.detach().clone(), dy.clone()
        y = op(x, group)
        unchanged(f"x, by {name}(x),", x, x_before)
        backpropagate(f"{name}(x)", y, dy)
        unchanged(f"the gradient that comes into the backward pass of {name}", dy, dy_before)


@target("f sends one all-reduce backward, g one forward", ranks=(2, 3))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Calls and bytes of each pass."""
    n = group.size
    for name, op, needed in (("f", mine.f, (0, 1)), ("g", mine.g, (1, 0))):
        x = draw(rng, 5, 3).requires_grad_()
        whole = Fraction(2 * (n - 1) * x.nbytes, n)
        with counted("all_reduce") as forward:
            y = op(x, group)
        with counted("all_reduce") as backward:
            backpropagate(f"{name}(x)", y, torch.ones_like(x))
        for direction, ledger, calls in (("forward", forward, needed[0]), ("backward", backward, needed[1])):
            exactly(f"all-reduces of {name} in the {direction} pass", len(ledger.rows), calls)
            exactly(f"bytes that {name} sends in the {direction} pass", ledger.bytes(), calls * whole)
