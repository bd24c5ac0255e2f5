"""What the workers under one mpirun share: worlds of its first ranks, and the result, which rank 0 writes as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def rest() -> None:
    """Wait for all ranks; asleep, since MPI's own wait takes the cores from those that still work."""
    arrived = WORLD.Ibarrier()
    while not arrived.Test():
        time.sleep(0.01)


def on_first_ranks(sizes: Iterable[int], work: Callable[[int], Any]) -> dict[int, list[Any]]:
    """What `work(size)` gives on the first `size` ranks, one size after the other: each rank's, in their order."""
    found = {}
    for size in sizes:
        mine = work(size) if WORLD.rank < size else None
        rest()
        found[size] = WORLD.allgather(mine)[:size]
    return found


def on_groups(work: Callable[[Any], Any]) -> dict[int, list[Any]]:
    """What `work` gives on process groups of 1, 2, ... and all ranks; None is a group of one."""
    import torch.distributed as dist

    from common.runtime import runtime

    with runtime() as rt:
        groups = {size: dist.new_group(list(range(size))) for size in range(2, rt.world_size + 1)}
        return on_first_ranks(range(1, rt.world_size + 1), lambda size: work(groups.get(size)))


def write(found: Any) -> None:
    """The worker's result, to the file of its first argument."""
    if WORLD.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
