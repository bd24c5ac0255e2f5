"""Targets of interleaved 1F1B: the checker's proof, chunks held, the bubble, and messages that take time."""

from fractions import Fraction
from typing import Any

import torch

from common.comm import Group
from common.grade.targets import target

from pp_schedules import make_schedule
from pp_slots import Answer, answer, bubble_at_most, holds_at_most

Plans = list[tuple[Answer, int]]


def answers(mine: Any, rng: torch.Generator) -> Plans:
    """Return (answer, chunks) for several sizes, the smallest first, proved by the checker."""
    drawn = torch.stack([torch.randint(2, high, (3,), generator=rng) for high in (9, 5, 4)], 1)
    sizes = [(1, 2, 1), (2, 2, 2), (2, 1, 1), (4, 2, 2), (4, 3, 1), *drawn.tolist()]
    return [
        (answer(lambda r, p=p, v=v, M=p * g: mine.interleaved(r, p, v, M), p * g, [*range(p)] * v), v)
        for p, v, g in sizes
    ]


@target("the checker proves the lists")
def proved(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Every computation once, on its rank, and no wait for ever."""
    answers(mine, rng)


@target("rank r holds at most 2(p-1-r) + (v-1)p + 1 chunks")
def memory(mine: Any, group: Group, rng: torch.Generator) -> None:
    """A chunk of a micro-batch is held from its forward to its backward."""
    for plan, v in answers(mine, rng):
        p = plan.schedule.ranks
        holds_at_most(plan, lambda r, p=p, v=v: 2 * (p - 1 - r) + (v - 1) * p + 1, "chunks")  # type: ignore[misc]


@target("a bubble of (p-1)/(vM+p-1)")
def the_bubble(mine: Any, group: Group, rng: torch.Generator) -> None:
    """In the simulator: a forward of a chunk takes 1 unit, a backward 2, a message 0."""
    for plan, v in answers(mine, rng):
        bubble_at_most(
            plan, make_schedule("interleaved", plan.schedule.ranks, plan.schedule.micro_batches, v)
        )


@target("no longer bubble with messages that take half a forward")
def slow_messages(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Messages travel while a rank computes, if it is far enough ahead."""
    for plan, v in answers(mine, rng):
        right = make_schedule("interleaved", plan.schedule.ranks, plan.schedule.micro_batches, v)
        bubble_at_most(plan, right, message=Fraction(1, 2))
