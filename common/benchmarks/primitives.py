"""The primitives of communication: the action of each, its expected result and the bytes it sends.

    one to many      rank 0 sends to each in turn        n-1 messages, one after another
    the same, tree   holders send it on                  round 1: 0->1   round 2: 0->2 1->3   ... log2(n) rounds
    broadcast        the library's one to many
    reduce           many to one, summed                 all-reduce      reduce, and all get the sum
    all-gather       all get all pieces                  reduce-scatter  reduce, and each gets a piece of the sum
    all-to-all       piece j of rank i becomes piece i of rank j: a transpose over ranks

Bytes that all n ranks send together, x being the largest tensor that a rank holds before or after (all-gather: the
result) and |x| its bytes: (n-1) |x|, and 2(n-1) |x| for all-reduce, which is a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def one_to_many(x: Tensor, group: Group) -> Tensor:
    """Send from rank 0 to each of the others in turn: the last one waits for n-1 messages."""
    if group.rank == 0:
        for other in range(1, group.size):
            comm.send(x, group, other)
    else:
        comm.recv(x, group, 0)
    return x


def rounds(n: int) -> list[list[tuple[int, int]]]:
    """Return a binomial tree from rank 0: (source, destination) by round. Holders double in each round."""
    return [
        [(source, source + have) for source in range(min(have, n - have))]
        for have in (2**k for k in range((n - 1).bit_length()))
    ]


def tree(x: Tensor, group: Group) -> Tensor:
    """Send from rank 0 to all in log2(n) rounds; all messages of a round travel at once."""
    for pairs in rounds(group.size):
        for source, destination in pairs:
            if group.rank == source:
                comm.send(x, group, destination)
            elif group.rank == destination:
                comm.recv(x, group, source)
    return x


def in_place(call: Callable[[Tensor, Group], object]) -> Callable[[Tensor, Group], Tensor]:
    """Return a function that calls the library and returns the tensor that it changed."""

    def run(x: Tensor, group: Group) -> Tensor:
        call(x, group)
        return x

    return run


Start = Callable[[int], Tensor]  # a rank's initial tensor


def first(start: Start, rank: int, n: int) -> Tensor:
    """Return rank 0's initial tensor."""
    return start(0)


def total(start: Start, rank: int, n: int) -> Tensor:
    """Return the sum over ranks."""
    return sum((start(r) for r in range(1, n)), start(0))


@dataclass(frozen=True)
class Primitive:
    """An operation and its expected result, `expected(start, rank, n)`; None if the result is undefined."""

    name: str
    idea: str
    run: Callable[[Tensor, Group], Tensor]
    expected: Callable[[Start, int, int], Tensor | None]
    passes: int = 1  # all ranks together send this times (n-1) |x|
    rooted: bool = False  # from or to one rank
    gathers: bool = False  # starts with a shard of x

    def sent(self, size: int, n: int) -> int:
        """Return the bytes that n ranks send together; size: |x|."""
        return self.passes * (n - 1) * size

    def bus_factor(self, n: int) -> Fraction:
        """Return bus bandwidth over algorithm bandwidth (nccl-tests, PERFORMANCE.md)."""
        return Fraction(1) if self.rooted else Fraction(self.passes * (n - 1), n)


PRIMITIVES = (
    Primitive("one to many", "rank 0 sends to each in turn", one_to_many, first, rooted=True),
    Primitive("one to many, tree", "each rank that has it sends it on", tree, first, rooted=True),
    Primitive("broadcast", "the library's one to many", in_place(comm.broadcast), first, rooted=True),
    Primitive(
        "reduce",
        "many to one, summed; undefined on other ranks",
        in_place(comm.reduce),
        lambda start, rank, n: total(start, rank, n) if rank == 0 else None,
        rooted=True,
    ),
    Primitive("all-reduce", "all get the sum", in_place(comm.all_reduce), total, passes=2),
    Primitive(
        "all-gather",
        "all get all pieces",
        comm.all_gather,
        lambda start, rank, n: torch.cat([start(r) for r in range(n)]),
        gathers=True,
    ),
    Primitive(
        "reduce-scatter",
        "each gets its piece of the sum",
        comm.reduce_scatter,
        lambda start, rank, n: total(start, rank, n).chunk(n)[rank],
    ),
    Primitive(
        "all-to-all",
        "piece j of rank i becomes piece i of rank j",
        comm.all_to_all,
        lambda start, rank, n: torch.cat([start(r).chunk(n)[rank].clone() for r in range(n)]),
    ),
)


def start_of(length: int, dtype: torch.dtype, device: torch.device) -> Start:
    """Return start(rank): 10(r+1) + 0, 1, 2 ... on rank r; the tens name the rank, the ones the piece."""
    return lambda rank: torch.arange(length, device=device).remainder(10).add(10 * (rank + 1)).to(dtype)
