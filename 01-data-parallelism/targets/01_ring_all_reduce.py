"""Targets of the ring all-reduce: sums of uneven chunks, x kept, messages and bytes counted."""

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from common.comm import Group
from common.grade.targets import counted, exactly, holds, same, target, unchanged


def vectors(group: Group, rng: torch.Generator, length: int) -> Tensor:
    """Return x_RN, one row per rank."""
    return torch.randn(group.size, length, generator=rng, dtype=torch.float64)


@target("every rank has the sum", ranks=(1, 2, 3, 4))
def the_sum(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Lengths that divide, that do not, and that are below the number of ranks."""
    for length in (12, 13, 2):
        x_RN = vectors(group, rng, length)
        own = x_RN[group.rank]
        mistakes = {
            "this rank's own x: nothing was added": own,
            "x of the rank on the left": x_RN[group.rank - 1],
            "the mean over the ranks, not the sum": x_RN.mean(0),
        }
        same(
            f"the result for length {length}", mine.ring_all_reduce(own.clone(), group), x_RN.sum(0), mistakes
        )


@target("x itself is unchanged", ranks=(3,))
def x_is_kept(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The result is a new tensor."""
    own = vectors(group, rng, 12)[group.rank]
    given = own.clone()
    mine.ring_all_reduce(given, group)
    unchanged("x", given, own)


@target("2(n-1) messages of 1/n of x", ranks=(2, 3, 4))
def the_messages(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Only neighbours' messages; exact numbers."""
    x_RN = vectors(group, rng, 12)
    with counted("send", "recv") as ledger:
        mine.ring_all_reduce(x_RN[group.rank].clone(), group)
    sent = [row.bytes for row in ledger.rows if row.op == "send"]
    n, whole = group.size, Fraction(x_RN[0].nbytes)
    exactly("messages that it sends", len(sent), 2 * (n - 1))
    exactly("bytes that it sends", sum(sent), 2 * (n - 1) * whole / n)
    holds(max(sent) == whole / n, f"its largest message has {max(sent)} bytes; a chunk has {whole / n}")
