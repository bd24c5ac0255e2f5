"""The group of ranks that a call communicates in."""

from __future__ import annotations

from dataclasses import dataclass

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
