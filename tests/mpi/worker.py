"""Shared parts of the workers under mpirun: worlds of the first ranks; rank 0 writes the result as JSON."""

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
    """Wait for all ranks, asleep: MPI's own wait would take the cores from ranks that still compute."""
    arrived = WORLD.Ibarrier()
    while not arrived.Test():
        time.sleep(0.01)


def on_first_ranks(sizes: Iterable[int], work: Callable[[int], Any]) -> dict[int, list[Any]]:
    """Run `work(size)` on the first `size` ranks, one size after another; return {size: results by rank}."""
    found = {}
    for size in sizes:
        mine = work(size) if WORLD.rank < size else None
        rest()
        found[size] = WORLD.allgather(mine)[:size]
    return found


def on_comms(work: Callable[[Any], Any], sizes: Iterable[int] | None = None) -> dict[int, Any]:
    """Run `work(comm)` on the first 1, 2, ... and all ranks, or on `sizes` of them; return {size: rank 0's result}."""
    sizes = list(sizes or range(1, WORLD.size + 1))
    comms = {size: WORLD.Split(WORLD.rank >= size, WORLD.rank) for size in sizes}
    for size, comm in comms.items():
        comm.Set_name(f"first {size}")  # errors name it

    def of_rank_0(size: int) -> Any:
        found = work(comms[size])
        return found if WORLD.rank == 0 else None

    return {size: ranks[0] for size, ranks in on_first_ranks(sizes, of_rank_0).items()}


def on_groups(work: Callable[[Any], Any]) -> dict[int, list[Any]]:
    """Run `work` on process groups of 1 (None), 2, ... and all ranks; return {size: results by rank}."""
    import torch.distributed as dist

    from common.launch.runtime import runtime

    with runtime() as rt:
        groups = {size: dist.new_group(list(range(size))) for size in range(2, rt.world_size + 1)}
        return on_first_ranks(range(1, rt.world_size + 1), lambda size: work(groups.get(size)))


def write(found: Any) -> None:
    """Write the worker's result to the file of its first argument, on rank 0."""
    if WORLD.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
