"""Targets of GPipe: the checker's proof, all forwards first, and the bubble by the simulator."""

from typing import Any

import torch

from common.comm import Group
from common.grade.targets import holds, target

from pp_schedules import make_schedule
from pp_slots import Answer, answer, bubble_at_most

OPS = ("F", "B", "SX", "RX", "SG", "RG")


def answers(mine: Any, rng: torch.Generator) -> list[Answer]:
    """Return the answer for several sizes, the smallest first, proved by the checker."""
    sizes = [(1, 2), (2, 1), (2, 3), (4, 8), *torch.randint(3, 9, (3, 2), generator=rng).tolist()]
    return [answer(lambda r, p=p, M=M: mine.gpipe(r, p, M), M, range(p), OPS) for p, M in sizes]


@target("the checker proves the lists")
def proved(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Every computation once, on its rank; messages matched; no wait for ever."""
    answers(mine, rng)


@target("all forwards of a rank before its backwards")
def forwards_first(mine: Any, group: Group, rng: torch.Generator) -> None:
    """This order makes it GPipe."""
    for plan in answers(mine, rng):
        for rank, row in enumerate(plan.lists):
            early = next(k for k, i in enumerate(row) if i.op == "B")
            late = next((i for i in row[early:] if i.op == "F"), None)
            holds(
                late is None,
                f"{plan}: slot {early} of rank {rank} is '{row[early]}', before the forward '{late}'",
            )


@target("a bubble of (p-1)/(M+p-1)")
def the_bubble(mine: Any, group: Group, rng: torch.Generator) -> None:
    """In the simulator: a forward takes 1 unit, a backward 2, a message 0."""
    for plan in answers(mine, rng):
        bubble_at_most(plan, make_schedule("gpipe", plan.schedule.ranks, plan.schedule.micro_batches))
