"""Latency of a small all-reduce by layer: MPI's own, our backend's, and what torch's wrappers add to it.

    mpirun -np 2 --bind-to core python common/benchmarks/latency.py

Each layer calls the one above it: the backend (C++), the process group (torch's dispatcher), `dist.all_reduce`
(torch's Python), the course's own counted call. `nothing` is torch's backend "fake", which returns at once: the time
that a layer takes whatever the backend does. A sample is the mean of 50 calls on the slowest rank.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
from fived import mpi
from mpi4py import MPI
from rich.table import Table
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from common import comm
from common.errors import UsageError
from common.launch import mpi_backend
from common.launch.command_line import Checked, Within, parse
from common.launch.program import run_program
from common.launch.terminal import make_table, terminal
from common.utils.visualizer import bytes_text

WORLD = MPI.COMM_WORLD
CALLS = 50  # of a sample


@dataclass
class Options(Checked):
    """Options: size and repeats."""

    size: Annotated[int, Within(4, 2**40)] = 4
    """Bytes of the tensor, float32."""
    repeats: Annotated[int, Within(5, 10**9)] = 201
    """Samples of each layer, in turn, after ten to warm up."""

    def validate(self) -> None:
        """Check the size and the number of ranks. Raises UsageError."""
        if self.size % 4:
            raise UsageError(f"--size {self.size}: give a multiple of 4 bytes, the size of a number")
        if WORLD.size < 2:
            raise UsageError("an all-reduce takes at least 2 ranks, not 1; start with mpirun -np 2")


def layers(group: dist.ProcessGroup, x: Tensor) -> dict[str, Callable[[], object]]:
    """Return an all-reduce of x by each layer above the transport, each of which calls the one before it."""
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = dist.ReduceOp.SUM, False  # type: ignore[assignment]
    backend: Any = group._get_backend(torch.device("cpu"))
    counted = comm.Group("world", WORLD.rank, WORLD.size, tuple(range(WORLD.size)), group)
    return {
        "Backend.allreduce": partial(backend.allreduce, [x], options),
        "ProcessGroup.allreduce": partial(group.allreduce, [x], options),
        "dist.all_reduce": partial(dist.all_reduce, x, group=group),
        "common.comm.all_reduce": partial(comm.all_reduce, x, counted),
    }


def is_right(call: Callable[[], object], x: Tensor) -> bool:
    """Return True if every rank gets the sum."""
    x.fill_(WORLD.rank + 1)
    call()
    right = bool((x == sum(range(WORLD.size + 1))).all())
    x.zero_()  # sums stay finite however often it is called
    return bool(WORLD.allreduce(right, MPI.LAND))


def loop(call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that makes the calls of a sample."""
    return lambda: [call() for _ in range(CALLS)]


def sample(calls: Callable[[], object]) -> float:
    """Return the microseconds of one of the calls, on the slowest rank."""
    WORLD.Barrier()
    start = time.perf_counter()
    calls()
    return float(WORLD.allreduce(time.perf_counter() - start, MPI.MAX)) / CALLS * 1e6


def measure(options: Options) -> tuple[Table, bool]:
    """Return the table, a row per layer, and whether all sums were right."""
    x, array = torch.zeros(options.size // 4), np.zeros(options.size // 4, np.float32)
    ours = layers(dist.group.WORLD, x)  # type: ignore[arg-type]
    nothing = layers(dist.new_group(backend="fake"), x)
    right = all(is_right(call, x) for call in ours.values())
    own = partial(mpi.all_reduce, mpi.Communicator(WORLD), array, CALLS)  # in a loop of C++
    rows: dict[str, dict[str, Callable[[], object]]] = {"MPI_Allreduce": {"MPI": own}}
    rows |= {name: {"fived": loop(ours[name]), "nothing": loop(nothing[name])} for name in ours}
    samples: dict[tuple[str, str], list[float]] = {(name, who): [] for name in rows for who in rows[name]}
    for i in range(-10, options.repeats):
        for name, who in samples:
            took = sample(rows[name][who])
            if i >= 0:
                samples[name, who].append(took)
    title = f"all-reduce of {bytes_text(options.size)}, float32, {WORLD.size} ranks, median µs (quartiles)"
    shown = make_table(title, ["layer", ">MPI", ">fived", ">nothing"])
    for name in rows:
        shown.add_row(name, *(cell(samples.get((name, who))) for who in ("MPI", "fived", "nothing")))
    return shown, right


def cell(samples: list[float] | None) -> str:
    """Return `median (first quartile-third quartile)`."""
    if samples is None:
        return ""
    first, median, third = statistics.quantiles(samples, n=4)
    return f"{median:.2f} ({first:.2f}-{third:.2f})"


def main(options: Options) -> bool:
    """Print the table; return True if all sums were right."""
    options.validate()
    torch.set_num_threads(1)
    mpi_backend.register()
    with tempfile.TemporaryDirectory() as folder:  # rank 0's is used
        store = dist.FileStore(str(Path(WORLD.bcast(folder), "store")), WORLD.size)
        dist.init_process_group(mpi_backend.NAME, store=store, rank=WORLD.rank, world_size=WORLD.size)
        shown, right = measure(options)
        terminal(quiet=WORLD.rank != 0, plain=True).print(shown)
        dist.destroy_process_group()
        WORLD.Barrier()
    return right


if __name__ == "__main__":
    run_program(lambda: 0 if main(parse(Options, __doc__)) else 1)
