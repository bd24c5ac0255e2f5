"""Our ring all-reduce, written from messages, beside MPI's own: time by size, in turn.

mpirun -np 2 --bind-to core python common/benchmarks/ring_all_reduce.py --repeats 21
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import tyro
from fived import collectives, mpi
from mpi4py import MPI
from rich.console import Console
from rich.table import Table


@dataclass
class Options:
    """Sizes and repeats."""

    sizes_mb: tuple[int, ...] = (1, 4, 16, 64)
    """Sizes of the buffer in MiB, float32."""
    repeats: int = 21
    """Timed calls of each, in turn, after three to warm up."""


def slowest(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank, from a barrier."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    call()
    return float(MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX))


def main(options: Options) -> None:
    """Print one row a size."""
    world = MPI.COMM_WORLD
    ours = mpi.Communicator(world)
    table = Table(title=f"all-reduce, float32, {world.size} ranks", title_justify="left")
    for column in ("MiB", "ring ms", "MPI_Allreduce ms", "MPI / ring (median)", "min to max"):
        table.add_column(column, justify="right")
    for size in options.sizes_mb:
        x, y = np.zeros(size * 2**18, np.float32), np.zeros(size * 2**18, np.float32)
        pairs = [
            (
                slowest(partial(collectives.ring_all_reduce, ours, x)),
                slowest(partial(world.Allreduce, MPI.IN_PLACE, y)),
            )
            for _ in range(options.repeats + 3)
        ][3:]
        ring, library = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
        ratios = sorted(b / a for a, b in pairs)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        table.add_row(str(size), f"{ring:.2f}", f"{library:.2f}", f"{statistics.median(ratios):.2f}", spread)
    Console(quiet=world.rank != 0, width=100, force_terminal=False).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
