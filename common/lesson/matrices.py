"""Lessons on split products C = A B: compared with numpy, their bytes counted, timed beside their ceiling.

    run_products(rt, o, Products("dp", ("split",), "2 rank(s)", {"rows": Way(...), "columns": Way(...)}))

M rows of A and C  K inner dimension  J columns of B and C
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group, sizes_of
from common.comm.checked import declare
from common.comm.checked.asked import if_asked
from common.comm.ledger import Ledger, show_bytes
from common.launch.command_line import Count, Size
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.equality import TOLERANCE, difference
from common.lesson.measure import BenchmarkRecord, Measured, in_turn, peak_memory
from common.lesson.runner import DTYPES, LessonOptions, console, write_records
from common.utils.matrix_generator import Matrix
from common.utils.visualizer import figure, throughput_bars

Array = NDArray[np.float64]
Place = tuple[slice, slice]  # rows and columns of a block
Call = Callable[[], Tensor]
ALONE = " alone"  # the product of a rank's pieces without communication: the ceiling


def cut(whole: slice, parts: int, i: int) -> slice:
    """Return piece i of the range `whole`, cut into `parts` pieces."""
    sizes = sizes_of(whole.stop - whole.start, parts)
    begin = whole.start + sum(sizes[:i])
    return slice(begin, begin + sizes[i])


@dataclass
class ProductOptions(LessonOptions, without=("data",)):
    """Options of the lessons on matrix products."""

    steps: Count = 5
    """Timed rounds."""
    shape: tuple[Size, Size, Size] = (211, 190, 167)
    """Rows of A, inner dimension, columns of B."""
    benchmark: bool = False
    """Only time, beside one rank, the ceiling without communication and libraries; check some rows of C."""


@dataclass(frozen=True)
class Way:
    """A way to split C = A B: this rank's blocks, the functions that multiply them, their bytes by formula."""

    places: Mapping[str, Place]
    """Places of this rank's blocks of "A", "B" and "C"; their gradients have the same."""
    inner: slice
    """Range of the inner dimension of this rank's own product."""
    multiply: Callable[[Tensor, Tensor], Tensor]
    """Function of the blocks of A and B; returns that of C, differentiable."""
    prepare: Callable[[Tensor, Tensor], Call]
    """Function of the same blocks; returns the forward pass, whose calls all write into the same memory."""
    formula: tuple[Fraction, Fraction]
    """Bytes that this rank sends (forward, backward)."""
    libraries: Callable[[Tensor, Tensor], Mapping[str, Call]] = lambda a, b: {}
    """Function of the same blocks; returns the forward pass of libraries, by name."""
    layout: tuple[str, ...] = ()
    """Cells that describe the way in the table."""
    also: Mapping[str, Callable[[Tensor], float]] = field(default_factory=dict)
    """Further differences to check, by name; functions of this rank's block of C."""


@dataclass(frozen=True)
class Products:
    """A lesson on matrix products: its axis, the titles of its table, its ways to multiply."""

    axis: str
    columns: tuple[str, ...]
    """Titles of the columns of the names and of the layouts."""
    where: str
    """Ranks on which the products run."""
    ways: Mapping[str, Way]
    tables: tuple[Table, ...] = ()
    """Tables to print after the proof."""


class Product:
    """C = A B with gradients: every rank makes any block of A, B, dC and of the expected results alone."""

    def __init__(self, o: ProductOptions, device: torch.device) -> None:
        self.dtype, self.device = o.dtype, device
        M, K, J = o.shape
        shapes = {"A": (M, K), "B": (K, J), "dC": (M, J)}
        self.made = {
            name: Matrix("random", *shape, seed=3 * o.seed + i)
            for i, (name, shape) in enumerate(shapes.items())
        }

    def block(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Array:
        """Return a block of A, B or dC in float64, rounded to the type of the run."""
        return self.made[name].block(rows, columns).astype(self.dtype).astype(np.float64)

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return the same block as a tensor of the run's type and device."""
        return torch.from_numpy(self.block(name, rows, columns)).to(self.device, DTYPES[self.dtype])

    def size(self, name: str) -> int:
        """Return the number of numbers of a whole matrix."""
        return self.made[name].rows * self.made[name].columns

    def expected(self, name: str, rows: slice, columns: slice) -> Array:
        """Return a block of C, dA or dB, by numpy in float64."""
        if name == "C":
            return self.block("A", rows) @ self.block("B", columns=columns)
        if name == "dA":
            return self.block("dC", rows) @ self.block("B", rows=columns).T
        return self.block("A", columns=rows).T @ self.block("dC", columns=columns)

    def apart(
        self, name: str, found: Tensor, place: Place, group: Group, at_most: int | None = None
    ) -> float:
        """Return the difference (common/lesson/equality.py) of this rank's block from numpy's, the group's largest.

        at_most: compare at most this many rows, evenly spread, if all would take too long.
        """
        rows, columns = place
        step = max(1, math.ceil(found.shape[0] / at_most)) if at_most else 1
        expected = torch.from_numpy(self.expected(name, slice(rows.start, rows.stop, step), columns))
        worst = difference(expected, found.detach()[::step].double().cpu())
        return max(comm.everyones(worst, group))


def multiplied(
    product: Product, way: Way, group: Group
) -> tuple[dict[str, float], tuple[Fraction, Fraction, Fraction]]:
    """Multiply, forward and backward, then by the prepared function.

    Return (largest differences from numpy of all ranks, bytes this rank sent: forward, backward, prepared).
    """
    a, b = (product.tensor(x, *way.places[x]).requires_grad_() for x in "AB")
    with if_asked(group):
        for name, x in (("A", a), ("B", b)):
            declare(x, **{group.axis: "I" if x.numel() == product.size(name) else "S"})
        with Ledger() as forward:
            c = way.multiply(a, b)
        with Ledger() as backward:
            c.backward(product.tensor("dC", *way.places["C"]))
        with Ledger() as again:
            prepared = way.prepare(a.detach(), b.detach())()
    assert a.grad is not None
    assert b.grad is not None
    results = {"C forward": c, "C prepared": prepared, "dA": a.grad, "dB": b.grad}
    found = {}
    for name, x in results.items():
        what = name.split()[0]
        found[name] = product.apart(what, x, way.places[what[-1]], group)
    found |= {name: max(comm.everyones(apart(c.detach()), group)) for name, apart in way.also.items()}
    return found, (forward.bytes(), backward.bytes(), again.bytes())


def prove_products(rt: Runtime, o: ProductOptions, lesson: Products) -> tuple[float, bool]:
    """Compare every product with numpy, and its bytes with the formula, on every rank; print both.

    Return (largest difference, True if all bytes are those of the formula).
    """
    product, largest, agree = Product(o, rt.device), 0.0, True
    results = ("C forward", "C prepared", "dA", "dB", *next(iter(lesson.ways.values())).also)
    heads = (*lesson.columns, *(f">{name}" for name in results))
    equality = make_table("max|x - numpy| / max|numpy|", heads)
    heads = (lesson.columns[0], ">forward", ">by formula", ">backward", ">by formula")
    sent = make_table("bytes a rank sent, mean", heads)
    for name, way in lesson.ways.items():
        found, counted = multiplied(product, way, rt.world)
        largest = max(largest, *found.values())
        every = comm.everyones((counted, way.formula), rt.world)
        agree &= all(mine == (*formula, formula[0]) for mine, formula in every)
        means = [sum((of[i][j] for of in every), Fraction(0)) / len(every) for j in (0, 1) for i in (0, 1)]
        sent.add_row(name, *map(show_bytes, means))
        equality.add_row(name, *way.layout, *(f"{d:.1e}" for d in found.values()))
    console(rt).print(f"C = A B, {described(o, lesson)}")
    console(rt).print(equality, sent, *lesson.tables)
    return largest, agree


def described(o: ProductOptions, lesson: Products) -> str:
    """Return the sizes, the type and the ranks, for titles."""
    return f"{' x '.join(map(str, o.shape))}, {o.dtype}, on {lesson.where}"


def benchmark(rt: Runtime, o: ProductOptions, lesson: Products) -> list[BenchmarkRecord]:
    """Time in turn each product, the same without messages (the ceiling), libraries, and one rank."""
    product, (M, K, J) = Product(o, rt.device), o.shape
    cases: dict[str, Callable[[], object]] = {"one rank": lambda: None}
    if rt.rank == 0:
        cases["one rank"] = into_memory(product.tensor("A"), product.tensor("B"))
    results: dict[str, Call] = {}
    for name, way in lesson.ways.items():
        blocks = {x: product.tensor(x, *way.places[x]) for x in "AB"}
        needed = {"A": (way.places["A"][0], way.inner), "B": (way.inner, way.places["B"][1])}
        a, b = (
            blocks[x] if place == way.places[x] else product.tensor(x, *place) for x, place in needed.items()
        )
        cases[name + ALONE] = into_memory(a, b)
        cases[name] = results[name] = way.prepare(*blocks.values())
        if o.benchmark:
            cases |= {f"{name} {of}": call for of, call in way.libraries(*blocks.values()).items()}
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    show_times(rt, o, lesson, measured)
    records = []
    for name, way in lesson.ways.items():
        m, apart = measured[name], product.apart("C", results[name](), way.places["C"], rt.world, at_most=4)
        records.append(
            BenchmarkRecord(
                strategy=lesson.axis,
                implementation=f"matrix product, {name}",
                language="pytorch",
                ranks=rt.world_size,
                backend=rt.backend,
                dtype=o.dtype,
                model=f"matrix product {M} x {K} x {J}",
                parameters=K * J,
                tokens_per_step=M,
                flop_per_step=2 * M * K * J,
                step_seconds=m.seconds,
                communication_seconds=median(m.blocked),
                bytes_counted=median(m.sent),
                bytes_formula=float(way.formula[0]),
                peak_memory_bytes=peak_memory(rt.world),
                scaling="strong",
                equal=apart <= TOLERANCE[DTYPES[o.dtype]],
                largest_difference=apart,
            )
        )
    return records


def into_memory(a: Tensor, b: Tensor) -> Call:
    """Return a function that multiplies a and b on this rank, into memory allocated once."""
    return partial(torch.mm, a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def show_times(rt: Runtime, o: ProductOptions, lesson: Products, measured: Mapping[str, Measured]) -> None:
    """Print a line per case except "one rank" and the ceilings, `first word of the case` + ALONE; draw --plot.

    ratio: the median over the rounds of time / alone; best: the best time / the best alone; of peak: against
    the fastest one-rank product times the ranks.
    """
    one, what, flop = measured["one rank"], described(o, lesson), 2 * math.prod(o.shape)
    peak = flop / min(one.seconds) * rt.world_size
    title = (
        f"{what}, {len(one.seconds)} rounds in turn, ms; "
        f"one alone {one.median * 1e3:.1f}, {flop / min(one.seconds) / 1e9:.0f} GFLOP/s"
    )
    numbers = "ms", "alone", "ratio", "best", "spread", "GFLOP/s", "of peak", "speed-up", "blocked"
    table = make_table(title, ["", *(f">{number}" for number in numbers)])
    speeds = {}
    for name, m in measured.items():
        if name == "one rank" or name.endswith(ALONE):
            continue
        speeds[name] = {rt.world_size: flop / m.median / 1e9}
        alone = measured[name.split()[0] + ALONE]
        ratios = [x / y for x, y in zip(m.seconds, alone.seconds, strict=True)]
        speed_ups = [x / y for x, y in zip(one.seconds, m.seconds, strict=True)]
        table.add_row(
            name,
            f"{m.median * 1e3:.1f}",
            f"{alone.median * 1e3:.1f}",
            f"{median(ratios):.3f}",
            f"{min(m.seconds) / min(alone.seconds):.3f}",
            f"{m.spread:.0%}",
            f"{flop / m.median / 1e9:.1f}",
            f"{flop / m.median / peak:.0%}",
            f"{median(speed_ups):.2f}",
            f"{median(m.blocked) * 1e3:.1f}" if name in lesson.ways else "-",
        )
    console(rt).print(table)
    if o.plot and rt.rank == 0:
        with figure(o.plot) as (axes,):
            throughput_bars(axes, speeds, unit="GFLOP/s", title=what)


def run_products(rt: Runtime, o: ProductOptions, lesson: Products) -> bool:
    """Prove and time the products, or with --benchmark time them and check some rows; return True if equal."""
    if rt.world_size > 1:
        torch.set_num_threads(1)
    out, limit, agree = console(rt), TOLERANCE[DTYPES[o.dtype]], True
    if o.benchmark:
        records = benchmark(rt, o, lesson)
        largest = max(r.largest_difference or 0.0 for r in records)
    else:
        largest, agree = prove_products(rt, o, lesson)
        records = [
            replace(r, equal=largest <= limit, largest_difference=largest) for r in benchmark(rt, o, lesson)
        ]
    if rt.rank == 0:
        write_records(o.json, [r.as_json() for r in records])
    if o.benchmark:
        out.print(f"some rows of each C differ from numpy's by {largest:.1e} at the most")
    elif largest > limit:
        out.print(f"NOT equal to numpy: a difference of {largest:.1e}, {limit:.0e} is allowed")
    elif not agree:
        out.print("equal to numpy, but the bytes counted are NOT those of the formula")
    else:
        out.print(
            f"proved: C, dA and dB equal numpy's within {limit:.0e}, bytes counted = formula on every rank"
        )
    return largest <= limit and agree
