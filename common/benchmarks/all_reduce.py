"""What an all-reduce costs: gloo, our process group on MPI, our ring of messages, MPI's own; by size, in turn.

    mpirun -np 2 --bind-to core python common/benchmarks/all_reduce.py

`copy` is the limit: every rank copies as many bytes once, and nobody waits for anybody.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import tyro
from fived import collectives, mpi
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

from common import mpi_backend
from common.lesson import write_records
from common.utils.bandwidth import Row
from common.watchdog import UsageError

Array = npt.NDArray[np.float32]
Calls = dict[str, Callable[[Array], object]]
WORLD = MPI.COMM_WORLD


@dataclass
class Options:
    """Sizes and repeats."""

    sizes: tuple[int, ...] = (4, 4096, 65536, 2**20, 2**22, 2**24, 2**26)
    """Bytes of the buffer, float32."""
    repeats: int = 21
    """Timed calls of each, in turn, after three to warm up."""
    json: Path | None = None
    """File to which a record for each size and implementation is appended."""

    def check(self) -> None:
        """Raises UsageError for what cannot be measured."""
        if not self.sizes or min(self.sizes) < 4:
            raise UsageError(f"--sizes {self.sizes}: bytes of float32, at least 4 each, such as 4 65536")
        if self.repeats < 5:
            raise UsageError(f"--repeats {self.repeats}: a median takes at least 5 samples")
        if WORLD.size < 2:
            raise UsageError("an all-reduce takes at least 2 ranks, not 1; start with mpirun -np 2")


@contextmanager
def implementations() -> Iterator[Calls]:
    """Name -> in-place all-reduce of an array; the first is what the others are compared with."""
    ours = mpi.Communicator(WORLD)
    spare: Array = np.empty(0, np.float32)
    mpi_backend.register()
    folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    store = dist.FileStore(str(Path(folder, "store")), WORLD.size)
    dist.init_process_group(mpi_backend.NAME, store=store, rank=WORLD.rank, world_size=WORLD.size)
    gloo = dist.new_group(backend="gloo")

    def copy(x: Array) -> None:
        nonlocal spare
        if spare.size != x.size:
            spare = np.empty_like(x)
        np.copyto(spare, x)

    yield {
        "MPI_Allreduce": lambda x: WORLD.Allreduce(MPI.IN_PLACE, x),
        "our ring": lambda x: collectives.ring_all_reduce(ours, x),
        "fived": lambda x: dist.all_reduce(torch.from_numpy(x), group=dist.group.WORLD),
        "gloo": lambda x: dist.all_reduce(torch.from_numpy(x), group=gloo),
        "copy": copy,
    }
    dist.destroy_process_group()


def shown(size: float) -> str:
    """Bytes for people: 4 B, 64 KiB, 16 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def is_right(call: Callable[[Array], object], numbers: int) -> bool:
    """Whether whole numbers, which float32 adds exactly, are summed on all ranks."""
    start, total = np.arange(numbers, dtype=np.float32) % 1000, WORLD.size * (WORLD.size + 1) // 2
    x = start * (WORLD.rank + 1)
    call(x)
    return bool(WORLD.allreduce(np.array_equal(x, start * np.float32(total)), MPI.MIN))


def measure(calls: Calls, size: int, repeats: int) -> dict[str, Row]:
    """Seconds of the slowest rank, from a barrier, for each implementation in turn.

    A sample is the mean of several calls where they are short: one alone would time an empty cache.
    """
    calls_each = max(1, min(20, 2**24 // size))
    x = np.zeros(size // 4, np.float32)  # sums stay finite however often it is called
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(-3, repeats):
        for name, call in calls.items():
            WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(calls_each):
                call(x)
            took = WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
            if i >= 0:
                seconds[name].append(took / calls_each)
    factor = 2 * (WORLD.size - 1) / WORLD.size
    right = {name: name == "copy" or is_right(call, size // 4) for name, call in calls.items()}
    return {
        name: Row(f"all-reduce, {name}", WORLD.size, "mpi", "float32", size, factor, right[name], times)
        for name, times in seconds.items()
    }


def main(options: Options) -> bool:
    """Print a row a size, write the records; whether all sums were right."""
    options.check()
    torch.set_num_threads(1)
    table = Table(title=f"all-reduce, float32, {WORLD.size} ranks, median µs", title_justify="left")
    rows: list[Row] = []
    with implementations() as calls:
        for column in ("size", *calls, "gloo / fived", "MPI / fived", "MPI / ring", "right"):
            table.add_column(column, justify="right", no_wrap=column in ("size", *calls))
        for size in options.sizes:
            found = measure(calls, size, options.repeats)
            rows += found.values()
            times = {name: statistics.median(row.seconds) for name, row in found.items()}
            ratios = (
                times[slow] / times[fast]
                for slow, fast in (
                    ("gloo", "fived"),
                    ("MPI_Allreduce", "fived"),
                    ("MPI_Allreduce", "our ring"),
                )
            )
            right = "yes" if all(row.correct for row in found.values()) else "NO"
            cells = [shown(size), *(f"{t * 1e6:,.1f}" for t in times.values()), *(f"{r:.2f}" for r in ratios)]
            table.add_row(*cells, right)
    Console(quiet=WORLD.rank != 0, width=110, force_terminal=False).print(table)
    if WORLD.rank == 0:
        write_records(options.json, [{"benchmark": "all_reduce", **asdict(row)} for row in rows])
    return all(row.correct for row in rows)


if __name__ == "__main__":
    try:
        sys.exit(0 if main(tyro.cli(Options, description=__doc__)) else 1)
    except UsageError as error:
        if WORLD.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
