"""Time and bandwidth of the primitives by size, as nccl-tests defines them.

    algorithm bandwidth = |x| / time
    bus bandwidth       = algorithm bandwidth times the bytes that a rank sends per byte of x, to be
                          compared with the speed of a link:
                          2(n-1)/n all-reduce; (n-1)/n all-gather, reduce-scatter, all-to-all; 1 from or to one rank

x is the larger tensor that a rank holds, before or after, and |x| its bytes; GB are 10^9 bytes, MiB 2^20. Time is the
slowest rank's between barriers, the median of the samples, with the copies that `common.comm` makes. The timed runs
send zeros, so that sums stay finite; another run checks the values.

Source: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from common import comm
from common.benchmarks.primitives import PRIMITIVES, Primitive, start_of
from common.errors import UsageError
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.measure import in_turn, spread
from common.lesson.runner import DTYPES, LessonOptions, write_records
from common.utils.visualizer import bandwidth_lines, figure


@dataclass
class BandwidthOptions(LessonOptions, without=("steps", "seed", "data", "check")):
    """Options of the benchmark."""

    dtype: Literal["float64", "float32"] = "float32"
    """Type of the numbers that the benchmark sends."""
    sizes_mb: tuple[Annotated[float, Within(1e-6, 1e6)], ...] = (1, 4, 16, 64)
    """Sizes to measure, in MiB."""
    repeats: Annotated[int, Within(5, 10**9)] = 7
    """Samples of each size, after 2 that do not count."""

    def validate(self) -> None:
        """Check that there is something to measure. Raises UsageError."""
        if not self.sizes_mb:
            raise UsageError("--sizes-mb is empty; give sizes in MiB, such as 1 4 16 64")


@dataclass
class Row:
    """One line of the benchmark: sizes in bytes, seconds of every sample, bandwidths in bytes a second."""

    primitive: str
    ranks: int
    backend: str
    dtype: str
    bytes: int
    bus_factor: float
    correct: bool
    seconds: list[float]
    algorithm_bandwidth: float = field(init=False)
    bus_bandwidth: float = field(init=False)

    def __post_init__(self) -> None:
        self.algorithm_bandwidth = self.bytes / median(self.seconds)
        self.bus_bandwidth = self.bus_factor * self.algorithm_bandwidth


def is_correct(primitive: Primitive, length: int, dtype: torch.dtype, rt: Runtime) -> bool:
    """Return True if every rank gets the expected result from `length` numbers per rank."""
    start = start_of(length, dtype, rt.device)
    result = primitive.run(start(rt.rank), rt.world)
    expected = primitive.expected(start, rt.rank, rt.world_size)
    wrong = torch.tensor(float(expected is not None and not torch.equal(result, expected)), device=rt.device)
    comm.all_reduce(wrong, rt.world)
    return not wrong.item()


def measure(
    rt: Runtime, size: int, dtype: torch.dtype, repeats: int, primitives: Sequence[Primitive] = PRIMITIVES
) -> list[Row]:
    """Return one row per primitive, at `size` bytes or the next smaller size that divides into n pieces."""
    n = rt.world_size
    numbers = max(1, size // dtype.itemsize // n) * n
    buffer = torch.full((numbers,), 0.0, dtype=dtype, device=rt.device)
    lengths = {p.name: numbers // n if p.gathers else numbers for p in primitives}
    cases: dict[str, Callable[[], object]] = {
        p.name: partial(p.run, buffer[: lengths[p.name]], rt.world) for p in primitives
    }
    measured = in_turn(cases, repeats, rt.world, device=rt.device.type)
    return [
        Row(
            primitive=p.name,
            ranks=n,
            backend=rt.backend,
            dtype=str(dtype).removeprefix("torch."),
            bytes=numbers * dtype.itemsize,
            bus_factor=float(p.bus_factor(n)),
            correct=is_correct(p, lengths[p.name], dtype, rt),
            seconds=measured[p.name].seconds,
        )
        for p in primitives
    ]


def table(rows: list[Row]) -> Table:
    """Return a table: sizes in MiB, times in ms, spread = (max - min) / median, bandwidths in GB/s."""
    title = f"{rows[0].ranks} ranks, {rows[0].backend}, {rows[0].dtype}"
    numbers = (">MiB", ">median ms", ">min ms", ">spread", ">algorithm GB/s", ">bus GB/s", ">correct")
    table, order = make_table(title, ("primitive", *numbers)), [row.primitive for row in rows]
    for r in sorted(rows, key=lambda r: (order.index(r.primitive), r.bytes)):
        times = (f"{1e3 * median(r.seconds):.3f}", f"{1e3 * min(r.seconds):.3f}", f"{spread(r.seconds):.0%}")
        speeds = (f"{b / 1e9:.3f}" for b in (r.algorithm_bandwidth, r.bus_bandwidth))
        table.add_row(r.primitive, f"{r.bytes / 2**20:.4g}", *times, *speeds, "yes" if r.correct else "NO")
    return table


def benchmark(rt: Runtime, options: BandwidthOptions, out: Console) -> bool:
    """Sweep the sizes, print and write the results; return True if every result was correct."""
    options.validate()
    rows: list[Row] = []
    for size in track(
        options.sizes_mb, "measuring", console=out, transient=True, disable=not out.is_terminal
    ):
        rows += measure(rt, int(size * 2**20), DTYPES[options.dtype], options.repeats)
    out.print(table(rows))
    if rt.rank == 0:
        write_records(options.json, [{"benchmark": "communication", **asdict(row)} for row in rows])
        if options.plot:
            draw(rows, options.plot)
    return all(row.correct for row in rows)


def draw(rows: list[Row], picture: Path) -> None:
    """Plot bus bandwidth over size, a line per primitive; those from or to one rank on the left."""
    with figure(picture, columns=2, width=9.6) as axes:
        for side, rooted, title in zip(
            axes, (True, False), ("from or to one rank", "between all ranks"), strict=True
        ):
            lines: dict[str, dict[int, float]] = {p.name: {} for p in PRIMITIVES if p.rooted is rooted}
            for row in rows:
                if row.primitive in lines:
                    lines[row.primitive][row.bytes] = row.bus_bandwidth / 1e9
            bandwidth_lines(side, lines, title=f"{title}: {rows[0].ranks} ranks, {rows[0].backend}")
