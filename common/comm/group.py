"""The group of ranks that a call communicates in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """The ranks that communicate along one axis.

    `ranks` are global ranks in order, `rank` is this rank's place among them; `pg` is None for one rank.
    """

    axis: str
    rank: int
    size: int
    ranks: tuple[int, ...]
    pg: dist.ProcessGroup | None = None

    @classmethod
    def alone(cls, axis: str = "one") -> Group:
        """Return a group of one rank, in which every collective returns at once."""
        return cls(axis, 0, 1, (0,))

    def part(self, axis: str, members: Sequence[int], timeout: float | None = None) -> Group:
        """Return the group of these members, which are places in this group, in their order. This rank is a member.

        timeout: of a new process group, in seconds. Every member must have joined equally many groups before: torch
        names a group by its ranks and that number, and waits until `timeout` if the names differ.
        """
        ranks, at = tuple(self.ranks[i] for i in members), members.index(self.rank)
        if len(ranks) in (1, self.size):
            return Group(axis, at, len(ranks), ranks, self.pg if len(ranks) > 1 else None)
        limit = None if timeout is None else timedelta(seconds=timeout)
        # only the members call this, so that several groups can make their parts at once
        pg = dist.new_group(list(ranks), limit, use_local_synchronization=True)
        return Group(axis, at, len(ranks), ranks, pg)
