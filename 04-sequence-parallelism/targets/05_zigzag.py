"""Targets of the zigzag order: a partition of the positions, work, tokens, runs, the way back.

S tokens of the sequence  s tokens of this rank  D width
"""

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from common.comm import Group
from common.grade.targets import Wrong, at_most, counted, exactly, holds, same, share, target

CASES = [
    (length, size) for size in range(1, 9) for length in (1920, 2005)
]  # 2n divides 1920, but not for n = 7


def cut(mine: Any, length: int, size: int) -> list[Tensor]:
    """Return the positions of every rank. Raises Wrong unless they are vectors of int64."""
    every = [mine.positions(length, rank, size) for rank in range(size)]
    for rank, p in enumerate(every):
        if not isinstance(p, Tensor) or p.dtype != torch.int64 or p.dim() != 1:
            raise Wrong(f"positions({length}, {rank}, {size}) is no vector of int64")
    return every


@target("every position is on one rank, rising")
def partition(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Small sequences first, whose positions one can write down."""
    for length, size in [(8, 2), (12, 3), (13, 2), *CASES]:
        every, case = cut(mine, length, size), f"{length} tokens on {size} ranks"
        for rank, p in enumerate(every):
            holds(
                bool((p.diff() > 0).all()), f"{case}: the positions of rank {rank} are not rising: {start(p)}"
            )
            holds(
                bool(((p >= 0) & (p < length)).all()),
                f"{case}: rank {rank} has positions outside of the sequence",
            )
        for place in (torch.cat(every).bincount(minlength=length) != 1).nonzero().flatten().tolist():
            ranks = [rank for rank, p in enumerate(every) if place in p]
            raise Wrong(f"{case}: position {place} is on {f'ranks {ranks}' if ranks else 'no rank'}")


def start(p: Tensor) -> str:
    """Return the first positions for a message."""
    return ", ".join(str(x) for x in p[:8].tolist()) + (", ..." if len(p) > 8 else "")


@target("the slowest rank's work is at most 1.01 times the mean")
def work(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Query-key pairs under a causal mask."""
    for length, size in CASES:
        pairs = [int((p + 1).sum()) for p in cut(mine, length, size)]
        slowest, ratio = max(range(size), key=pairs.__getitem__), Fraction(max(pairs) * size, sum(pairs))
        at_most(
            f"{length} tokens on {size} ranks: work of the slowest, rank {slowest}, over the mean",
            float(ratio),
            1.01,
        )


@target("tokens of two ranks differ by at most two")
def tokens(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Memory is even, too."""
    for length, size in CASES:
        sizes = [len(p) for p in cut(mine, length, size)]
        holds(max(sizes) - min(sizes) <= 2, f"{length} tokens on {size} ranks: the ranks have {sizes} tokens")


@target("at most two contiguous runs per rank")
def runs(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Ring attention multiplies whole blocks; single tokens in turn would leave a mask in every block."""
    for length, size in CASES:
        for rank, p in enumerate(cut(mine, length, size)):
            found = int((p.diff() != 1).sum()) + 1
            at_most(f"{length} tokens on {size} ranks: contiguous runs of rank {rank} ({start(p)})", found, 2)


@target("the way back to the order of the sequence", ranks=(1, 2, 3, 4))
def way_back(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Lengths that 2n divides, and that it does not."""
    for length in (24, 29):
        x_SD = torch.randn(length, 3, generator=rng, dtype=torch.float64)
        every = cut(mine, length, group.size)
        own = x_SD[every[group.rank]]
        order = torch.cat(every)
        mistakes = {
            "in the order of the ranks: each row is still to be put at its position": x_SD[order],
            "permuted the wrong way: take the inverse of the permutation": x_SD[order][order],
        }
        same(f"the whole of {length} tokens", mine.whole(own.clone(), length, group), x_SD, mistakes)


@target("one all-gather for the way back", ranks=(2, 3))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Calls and bytes; none for the positions."""
    with counted():
        own = mine.positions(24, group.rank, group.size)
    x_sD = torch.randn(len(own), 3, generator=rng, dtype=torch.float64)
    with counted("all_gather") as ledger:
        mine.whole(x_sD, 24, group)
    exactly("all-gathers", len(ledger.rows), 1)
    exactly("bytes sent", ledger.bytes(), share(1, 24 * x_sD[0].nbytes, group))
