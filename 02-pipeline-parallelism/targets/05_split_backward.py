"""Targets of the split backward: dx and dw apart, their operations and memory; ZB-H1's proof, memory and bubble."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from common.comm import Group
from common.grade.targets import at_most, holds, same, target
from common.utils.memory import LiveBytes

from pp_schedules import make_schedule
from pp_slots import Answer, answer, bubble_at_most, holds_at_most

Later = list[Callable[[], None]]


def random(rng: torch.Generator, *shape: int) -> Tensor:
    """Return a tensor in float64 that needs a gradient."""
    return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()


@target("dx after backward(), dw after the functions in `later`")
def the_gradients(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Two layers and two micro-batches of different sizes; the batch itself needs no gradient in the second one."""
    w = [random(rng, 6, 4), random(rng, 3, 6)]
    right = [p.detach().clone().requires_grad_() for p in w]
    later: Later = []
    for m, b in enumerate((5, 2)):
        x, dy = random(rng, b, 4), random(rng, b, 3).detach()
        want = x.detach().clone().requires_grad_()
        ((want @ right[0].T).tanh() @ right[1].T).backward(dy)
        x.requires_grad_(m == 0)
        y = mine.product(mine.product(x, w[0], later).tanh(), w[1], later)
        same(f"y of micro-batch {m}", y, (want @ right[0].T).tanh() @ right[1].T)
        y.backward(dy)
        if m == 0:
            first = [p.grad.clone() for p in right]
            same("dx of the first layer", x.grad, want.grad)
    for layer, p in enumerate(w):
        holds(p.grad is None, f"after backward() and before W, w.grad of layer {layer} is a tensor, not None")
    functions = "functions in `later` after 2 backward passes of 2 layers"
    holds(len(later) == 4, f"{functions}: {len(later)}, exactly 4 are needed")
    for add in reversed(later):  # any order is allowed
        add()
    for layer, (p, r) in enumerate(zip(w, right, strict=True)):
        alone = {
            "that of micro-batch 0 alone: add to w.grad": first[layer],
            "that of micro-batch 1 alone: add to w.grad": r.grad - first[layer],
        }
        same(f"dw of layer {layer}", p.grad, r.grad, alone)
        holds(not p.grad.requires_grad, f"w.grad of layer {layer} carries a graph: compute under no_grad")


@target("one matrix product in the backward, one in each function of `later`")
def the_operations(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Multiplications and additions are counted; each of the two gradients takes 2 b I O."""
    x, w, dy = random(rng, 3, 5), random(rng, 4, 5), random(rng, 3, 4).detach()
    later: Later = []
    y = mine.product(x, w, later)
    for part, run in (
        ("I (backward)", lambda: y.backward(dy)),
        ("W (`later`)", lambda: [f() for f in later]),
    ):
        with FlopCounterMode(display=False) as count:
            run()
        at_most(f"operations of matrix products in {part}", count.get_total_flops(), 2 * 3 * 5 * 4)


@target("between I and W it keeps no more than x and dy")
def the_memory(mine: Any, group: Group, rng: torch.Generator) -> None:
    """With few samples dw is much larger than both."""
    b, wide, out = 2, 30, 40
    x, w, dy = random(rng, b, wide), random(rng, out, wide), random(rng, b, out).detach()
    later: Later = []
    with LiveBytes() as live:
        mine.product(x, w, later).backward(dy)
        kept = live.now - x.grad.nbytes
    at_most(
        f"bytes kept for W; x and dy have {x.nbytes + dy.nbytes}, dw {w.nbytes}", kept, x.nbytes + dy.nbytes
    )


def answers(mine: Any, rng: torch.Generator) -> list[Answer]:
    """Return the schedules for several sizes with M >= p, the smallest first, proved by the checker."""
    drawn = [(p, p + more) for p, more in torch.randint(2, 7, (3, 2), generator=rng).tolist()]
    sizes = [(1, 2), (2, 2), (3, 4), (4, 8), *drawn]
    return [answer(lambda r, p=p, M=M: mine.zb_h1(r, p, M), M, range(p), ("F", "I", "W")) for p, M in sizes]


@target("zb_h1: the checker proves the lists")
def proved(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Every F, I and W once, in this order, and no wait for ever."""
    answers(mine, rng)


@target("zb_h1: every rank holds at most p micro-batches")
def memory(mine: Any, group: Group, rng: torch.Generator) -> None:
    """From F to W."""
    for plan in answers(mine, rng):
        holds_at_most(plan, lambda _, p=plan.schedule.ranks: p)  # type: ignore[misc]


@target("zb_h1: a bubble of (p-1)/(3M+p-1)")
def the_bubble(mine: Any, group: Group, rng: torch.Generator) -> None:
    """In the simulator: F, I and W take 1 unit each, a message 0."""
    for plan in answers(mine, rng):
        bubble_at_most(plan, make_schedule("zb-h1", plan.schedule.ranks, plan.schedule.micro_batches))
