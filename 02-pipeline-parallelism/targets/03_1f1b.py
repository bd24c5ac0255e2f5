"""Targets of 1F1B: the checker's proof, micro-batches held, and the bubble by the simulator."""

from typing import Any

import torch

from common.comm import Group
from common.grade.targets import target

from pp_schedules import make_schedule
from pp_slots import Answer, answer, bubble_at_most, holds_at_most


def answers(mine: Any, rng: torch.Generator) -> list[Answer]:
    """Return the answer for several sizes, the smallest first, proved by the checker."""
    sizes = [(1, 2), (2, 1), (2, 3), (4, 8), (5, 3), *torch.randint(3, 9, (3, 2), generator=rng).tolist()]
    return [answer(lambda r, p=p, M=M: mine.one_f_one_b(r, p, M), M, range(p)) for p, M in sizes]


@target("the checker proves the lists")
def proved(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Every computation once, on its rank, and no wait for ever."""
    answers(mine, rng)


@target("rank r holds at most p - r micro-batches")
def memory(mine: Any, group: Group, rng: torch.Generator) -> None:
    """From the forward to the backward."""
    for plan in answers(mine, rng):
        holds_at_most(plan, lambda r, p=plan.schedule.ranks: p - r)  # type: ignore[misc]


@target("a bubble of (p-1)/(M+p-1)")
def the_bubble(mine: Any, group: Group, rng: torch.Generator) -> None:
    """In the simulator: a forward takes 1 unit, a backward 2 or 5, a message 0."""
    for plan in answers(mine, rng):
        right = make_schedule("1f1b", plan.schedule.ranks, plan.schedule.micro_batches)
        bubble_at_most(plan, right)
        bubble_at_most(plan, right, backward=5)
