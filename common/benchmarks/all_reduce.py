"""Cost of an all-reduce by size: MPI's own, our ring of messages, our process group on MPI, gloo; in turn.

    mpirun -np 2 --bind-to core python common/benchmarks/all_reduce.py
    mpirun -np 2 --bind-to core python common/benchmarks/all_reduce.py --collectives reduce-scatter all-gather

`MPI`'s all-reduce is called in a loop of C++, so that Python's part is not in its time. `copy` is the limit: every rank
copies as many bytes once, without waiting for another rank.

A machine that others use too has slow moments. They are detected by 200 barriers before and after each
sample: if these take more than 1.5 times the shortest ones, the sample does not count (unless fewer than 5
would be left).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from fived import collectives, mpi
from mpi4py import MPI
from rich.table import Table

from common.benchmarks.bandwidth import Row
from common.benchmarks.primitives import PRIMITIVES, start_of
from common.errors import UsageError
from common.launch import mpi_backend
from common.launch.command_line import Checked, Within, parse
from common.launch.program import run_program
from common.launch.terminal import make_table, terminal
from common.lesson.runner import write_records
from common.utils.visualizer import bytes_text

Array = npt.NDArray[np.float32]
Calls = dict[str, Callable[[int], object]]
Name = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"]
WORLD = MPI.COMM_WORLD
BY_NAME = {primitive.name: primitive for primitive in PRIMITIVES}
IN_PLACE = ("all-reduce", "broadcast")


@dataclass
class Options(Checked):
    """Options: collectives, sizes and repeats."""

    collectives: tuple[Name, ...] = ("all-reduce",)
    """Collectives to measure, one table each."""
    sizes: tuple[Annotated[int, Within(4, 2**40)], ...] = (4, 4096, 65536, 2**20, 2**22, 2**24, 2**26)
    """Bytes of the buffer, float32: the larger of a rank's input and output."""
    repeats: Annotated[int, Within(5, 10**9)] = 21
    """Timed calls of each implementation, in turn, after three to warm up."""
    json: Path | None = None
    """File to which a record for each size and implementation is appended."""

    def validate(self) -> None:
        """Check that there is something to measure. Raises UsageError."""
        if not self.sizes:
            raise UsageError("--sizes is empty; give bytes of float32, such as 4 65536")
        if not self.collectives:
            raise UsageError(f"--collectives: at least one of {', '.join(get_args(Name))}")
        if WORLD.size < 2:
            raise UsageError("an all-reduce takes at least 2 ranks, not 1; start with mpirun -np 2")


@contextmanager
def groups() -> Iterator[dict[str, dist.ProcessGroup]]:
    """Yield the process groups to compare by name: ours and gloo's."""
    mpi_backend.register()
    folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    store = dist.FileStore(str(Path(folder, "store")), WORLD.size)
    dist.init_process_group(mpi_backend.NAME, store=store, rank=WORLD.rank, world_size=WORLD.size)
    ours = dist.group.WORLD
    assert ours is not None
    yield {"fived": ours, "gloo": dist.new_group(backend="gloo")}
    dist.destroy_process_group()


def implementations(
    name: Name, comm: mpi.Communicator, by: dict[str, dist.ProcessGroup], x: Array, y: Array
) -> Calls:
    """Return, by implementation, a function that runs the collective from x to y a given number of times.

    All-reduce and broadcast work in place: they change x, and y is x.
    """
    tx, ty, spare = torch.from_numpy(x), torch.from_numpy(y), np.zeros(max(x.size, y.size), np.float32)

    def loop(call: Callable[[], object]) -> Callable[[int], object]:
        return lambda times: [call() for _ in range(times)]

    def torchs(group: dist.ProcessGroup) -> Callable[[], object]:
        return {
            "all-reduce": partial(dist.all_reduce, tx, group=group),
            "reduce-scatter": partial(dist.reduce_scatter_single, ty, tx, group=group),
            "all-gather": partial(dist.all_gather_single, ty, tx, group=group),
            "all-to-all": partial(dist.all_to_all_single, ty, tx, group=group),
            "broadcast": partial(dist.broadcast, tx, 0, group=group),
        }[name]

    own: dict[str, Callable[[], object]] = {
        "reduce-scatter": partial(WORLD.Reduce_scatter_block, x, y),
        "all-gather": partial(WORLD.Allgather, x, y),
        "all-to-all": partial(WORLD.Alltoall, x, y),
        "broadcast": partial(WORLD.Bcast, x),
    }
    calls: Calls = {"MPI": loop(own[name]) if name in own else partial(mpi.all_reduce, comm, x)}
    if name == "all-reduce":
        calls["our ring"] = loop(partial(collectives.ring_all_reduce, comm, x))
    calls |= {who: loop(torchs(group)) for who, group in by.items()}
    return calls | {"copy": loop(partial(np.copyto, spare, x if x.size == spare.size else y))}


def buffers(name: Name, numbers: int) -> tuple[Array, Array, Array]:
    """Return this rank's input, output buffer and expected output: integers, which float32 adds exactly."""
    primitive, n, place = BY_NAME[name], WORLD.size, name in IN_PLACE
    length = numbers if place else max(1, numbers // n) * (1 if primitive.gathers else n)
    start = start_of(length, torch.float32, torch.device("cpu"))
    x, expected = start(WORLD.rank).numpy(), primitive.expected(start, WORLD.rank, n)
    assert expected is not None
    return x, x if place else np.zeros(len(expected), np.float32), expected.numpy()


def is_right(call: Callable[[int], object], x: Array, y: Array, given: Array, expected: Array) -> bool:
    """Return True if every rank gets the expected output."""
    y[:] = 0
    x[:] = given
    call(1)
    return bool(WORLD.allreduce(np.array_equal(y, expected), MPI.MIN))


def barriers() -> float:
    """Return the seconds of 200 barriers, a measure of how busy the machine is."""
    start = time.perf_counter()
    for _ in range(200):
        WORLD.Barrier()
    return time.perf_counter() - start


def measure(
    name: Name, comm: mpi.Communicator, by: dict[str, dist.ProcessGroup], size: int, repeats: int
) -> tuple[dict[str, Row], int]:
    """Seconds of the slowest rank for each implementation in turn; how many samples of the least quiet one count.

    A sample is the mean of several calls where they are short: one alone would time an empty cache.
    """
    calls_each = max(1, min(20, 2**24 // size))
    x, y, expected = buffers(name, size // 4)
    given, calls = x.copy(), implementations(name, comm, by, x, y)
    right = {who: who == "copy" or is_right(call, x, y, given, expected) for who, call in calls.items()}
    x[:] = 0  # sums stay finite however often it is called
    samples: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
    for i in range(-3, repeats):
        for who, call in calls.items():
            before = barriers()
            start = time.perf_counter()
            call(calls_each)
            took = WORLD.allreduce(time.perf_counter() - start, MPI.MAX) / calls_each
            met = WORLD.allreduce(max(before, barriers()), MPI.MAX)
            if i >= 0:
                samples[who].append((took, met))
    limit = 1.5 * min(met for every in samples.values() for _, met in every)
    quiet = {who: [took for took, met in every if met <= limit] for who, every in samples.items()}
    factor = float(BY_NAME[name].bus_factor(WORLD.size))
    rows = {
        who: Row(
            primitive=f"{name}, {who}",
            ranks=WORLD.size,
            backend="mpi",
            dtype="float32",
            bytes=4 * max(x.size, y.size),
            bus_factor=factor,
            correct=right[who],
            seconds=times if len(times) >= 5 else [took for took, _ in samples[who]],
        )
        for who, times in quiet.items()
    }
    return rows, min(map(len, quiet.values()))


def compare(
    name: Name, comm: mpi.Communicator, by: dict[str, dist.ProcessGroup], options: Options
) -> tuple[Table, list[Row]]:
    """Return the table of one collective, a row per size, and its records."""
    by_size = {size: measure(name, comm, by, size, options.repeats) for size in options.sizes}
    rows = [row for found, _ in by_size.values() for row in found.values()]
    pairs = (("gloo", "fived"), ("MPI", "fived"), ("fived", "copy"))
    first, _ = by_size[options.sizes[0]]
    heads = ["size", *first, *(f"{a} / {b}" for a, b in pairs), "quiet", "right"]
    table = make_table(f"{name}, float32, {WORLD.size} ranks, median µs", [f">{head}" for head in heads])
    for size, (found, quiet) in by_size.items():
        times = {who: statistics.median(row.seconds) for who, row in found.items()}
        table.add_row(
            bytes_text(size),
            *(f"{t * 1e6:,.1f}" for t in times.values()),
            *(f"{times[a] / times[b]:.2f}" for a, b in pairs),
            f"{quiet}/{options.repeats}",
            "yes" if all(row.correct for row in found.values()) else "NO",
        )
    return table, rows


def main(options: Options) -> bool:
    """Print a table per collective and write the records; return True if all results were right."""
    options.validate()
    torch.set_num_threads(1)
    comm, out = mpi.Communicator(WORLD), terminal(quiet=WORLD.rank != 0, plain=True)
    rows: list[Row] = []
    with groups() as by:
        for name in options.collectives:
            table, found = compare(name, comm, by, options)
            out.print(table)
            rows += found
    if WORLD.rank == 0:
        write_records(options.json, [{"benchmark": "collectives", **asdict(row)} for row in rows])
    return all(row.correct for row in rows)


if __name__ == "__main__":
    run_program(lambda: 0 if main(parse(Options, __doc__)) else 1)
