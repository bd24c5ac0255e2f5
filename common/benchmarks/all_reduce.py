"""Our ring all-reduce, written from messages, beside MPI's own: time by size, in turn.

mpirun -np 2 --bind-to core python common/benchmarks/ring_all_reduce.py --repeats 21
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tyro
from fived import collectives, mpi
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

from common.lesson import write_records
from common.utils.bandwidth import Row
from common.watchdog import UsageError

Array = npt.NDArray[np.float32]
RING, LIBRARY = "all-reduce, our ring", "all-reduce, MPI_Allreduce"


@dataclass
class Options:
    """Sizes and repeats."""

    sizes_mb: tuple[int, ...] = (1, 4, 16, 64)
    """Sizes of the buffer in MiB, float32."""
    repeats: int = 21
    """Timed calls of each, in turn, after three to warm up."""
    json: Path | None = None
    """File to which a record for each size and implementation is appended."""

    def check(self) -> None:
        """Raises UsageError for what cannot be measured."""
        if not self.sizes_mb or min(self.sizes_mb) < 1:
            raise UsageError(f"--sizes-mb {self.sizes_mb}: sizes are at least 1, such as 1 4 16 64")
        if self.repeats < 5:
            raise UsageError(f"--repeats {self.repeats}: a median takes at least 5 samples")
        if MPI.COMM_WORLD.size < 2:
            raise UsageError("an all-reduce takes at least 2 ranks, not 1; start with mpirun -np 2")


def slowest(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank, from a barrier."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    call()
    return float(MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX))


def measure(size: int, repeats: int) -> list[Row]:
    """Our ring and MPI_Allreduce on `size` bytes in turn; both are checked on small integers first."""
    world = MPI.COMM_WORLD
    ours = mpi.Communicator(world)
    calls: dict[str, Callable[[Array], object]] = {
        RING: lambda x: collectives.ring_all_reduce(ours, x),
        LIBRARY: lambda x: world.Allreduce(MPI.IN_PLACE, x),
    }
    correct: dict[str, bool] = {}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    start, total = np.arange(size // 4, dtype=np.float32) % 1000, world.size * (world.size + 1) / 2
    for name, call in calls.items():
        x = start * (world.rank + 1)
        call(x)
        correct[name] = bool(world.allreduce(np.array_equal(x, start * np.float32(total)), MPI.MIN))
    zeros = np.zeros_like(start)  # sums stay finite however often it is called
    for i in range(-3, repeats):
        for name, call in calls.items():
            took = slowest(partial(call, zeros))
            if i >= 0:
                seconds[name].append(took)
    factor = 2 * (world.size - 1) / world.size
    return [Row(n, world.size, "mpi", "float32", size, factor, correct[n], seconds[n]) for n in calls]


def main(options: Options) -> bool:
    """Print one row a size, write the records; whether all sums were right."""
    options.check()
    world = MPI.COMM_WORLD
    table = Table(title=f"all-reduce, float32, {world.size} ranks", title_justify="left")
    for column in ("MiB", "ring ms", "MPI_Allreduce ms", "MPI / ring (median)", "min to max", "correct"):
        table.add_column(column, justify="right")
    rows: list[Row] = []
    for size in options.sizes_mb:
        ring, library = measure(size * 2**20, options.repeats)
        rows += [ring, library]
        times = (f"{statistics.median(row.seconds) * 1e3:.2f}" for row in (ring, library))
        ratios = sorted(b / a for a, b in zip(ring.seconds, library.seconds, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        right = "yes" if ring.correct and library.correct else "NO"
        table.add_row(str(size), *times, f"{statistics.median(ratios):.2f}", spread, right)
    Console(quiet=world.rank != 0, width=100, force_terminal=False).print(table)
    if world.rank == 0:
        write_records(options.json, [{"benchmark": "ring_all_reduce", **asdict(row)} for row in rows])
    return all(row.correct for row in rows)


if __name__ == "__main__":
    try:
        sys.exit(0 if main(tyro.cli(Options, description=__doc__)) else 1)
    except UsageError as error:
        if MPI.COMM_WORLD.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
