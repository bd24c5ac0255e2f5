"""Shared parts of the lessons on split matrix products: blocks, numpy's results, the table of times.

M rows of A and C  K inner dimension  J columns of B and C
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.equality import TOLERANCE, difference
from common.lesson.measure import BenchmarkRecord, Measured, peak_memory
from common.lesson.runner import DTYPES, console, write_records
from common.utils.matrix_generator import Matrix

Array = NDArray[np.float64]
ALONE = " alone"  # the product of a rank's pieces without communication: the ceiling


class Product:
    """C = A B with gradients: every rank makes any block of A, B, dC and of the expected results alone."""

    axis = "dp"
    """The axis along which ranks split it, in the records."""

    def __init__(self, shape: tuple[int, int, int], dtype: str, seed: int, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        M, K, J = shape
        self.shapes = {"A": (M, K), "B": (K, J), "C": (M, J), "dA": (M, K), "dB": (K, J), "dC": (M, J)}
        self.made = {
            name: Matrix("random", *self.shapes[name], seed=3 * seed + i)
            for i, name in enumerate(("A", "B", "dC"))
        }

    def block(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Array:
        """Return a block of A, B or dC in float64, rounded to the type of the run."""
        return self.made[name].block(rows, columns).astype(self.dtype).astype(np.float64)

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return the same block as a tensor of the run's type and device."""
        return torch.from_numpy(self.block(name, rows, columns)).to(self.device, DTYPES[self.dtype])

    def expected(self, name: str, rows: slice, columns: slice) -> Array:
        """Return a block of C, dA or dB, by numpy in float64."""
        if name == "C":
            return self.block("A", rows) @ self.block("B", columns=columns)
        if name == "dA":
            return self.block("dC", rows) @ self.block("B", rows=columns).T
        return self.block("A", columns=rows).T @ self.block("dC", columns=columns)

    def apart(
        self, name: str, found: Tensor, rows: slice, columns: slice, group: Group, at_most: int | None = None
    ) -> float:
        """Return the difference (common/lesson/equality.py) of this rank's block from numpy's, the group's largest.

        at_most: compare at most this many rows, evenly spread, if all would take too long.
        """
        step = max(1, math.ceil(found.shape[0] / at_most)) if at_most else 1
        expected = torch.from_numpy(self.expected(name, slice(rows.start, rows.stop, step), columns))
        worst = difference(expected, found.detach()[::step].double().cpu())
        over_ranks = torch.tensor(worst, dtype=torch.float64, device=self.device)
        comm.all_reduce(over_ranks, group, "max")
        return over_ranks.item()


def times_table(
    what: str, measured: Mapping[str, Measured], flop: int, ranks: int, seen: Collection[str]
) -> Table:
    """Return a line per case except "one rank" and the ceilings, `first word of the case` + ALONE.

    what: beginning of the title. seen: cases whose communication the ledger sees. ratio: the median over the
    rounds of time / alone; best: the best time / the best alone; of peak: against the fastest one-rank
    product times the ranks.
    """
    one = measured["one rank"]
    peak = flop / min(one.seconds) * ranks
    title = (
        f"{what}, {ranks} rank(s), {len(one.seconds)} rounds in turn, ms; "
        f"one alone {one.median * 1e3:.1f}, {flop / min(one.seconds) / 1e9:.0f} GFLOP/s"
    )
    numbers = "ms", "alone", "ratio", "best", "spread", "GFLOP/s", "of peak", "speed-up", "blocked"
    table = make_table(title, ["", *(f">{number}" for number in numbers)])
    for name, m in measured.items():
        if name == "one rank" or name.endswith(ALONE):
            continue
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
            f"{median(m.blocked) * 1e3:.1f}" if name in seen else "-",
        )
    return table


def record(
    rt: Runtime, name: str, product: Product, measured: Measured, formula: float, apart: float
) -> BenchmarkRecord:
    """Return the record of one way to multiply. formula: bytes that this rank sends; apart: see Product."""
    (M, K), (_, J), dtype = product.shapes["A"], product.shapes["B"], product.dtype
    return BenchmarkRecord(
        strategy=product.axis,
        implementation=f"matrix product, {name}",
        language="pytorch",
        ranks=rt.world_size,
        backend=rt.backend,
        dtype=dtype,
        model=f"matrix product {M} x {K} x {J}",
        parameters=K * J,
        tokens_per_step=M,
        flop_per_step=2 * M * K * J,
        step_seconds=measured.seconds,
        communication_seconds=median(measured.blocked),
        bytes_counted=median(measured.sent),
        bytes_formula=formula,
        peak_memory_bytes=peak_memory(rt.world),
        scaling="strong",
        equal=apart <= TOLERANCE[DTYPES[dtype]],
        largest_difference=apart,
    )


def proved(
    rt: Runtime, records: Sequence[BenchmarkRecord], file: Path | None, largest: float, agree: bool
) -> bool:
    """Write the records, print the verdict; return True if proved.

    largest: largest difference. agree: True if this rank's bytes equal the formula.
    """
    limit, out = TOLERANCE[DTYPES[records[0].dtype]], console(rt)
    wrong = torch.tensor(float(not agree), device=rt.device)
    comm.all_reduce(wrong, rt.world, "max")
    if rt.rank == 0:
        equal = [replace(r, equal=largest <= limit, largest_difference=largest) for r in records]
        write_records(file, [r.as_json() for r in equal])
    if largest > limit:
        out.print(f"NOT equal to numpy: a difference of {largest:.1e}, {limit:.0e} is allowed")
    elif wrong:
        out.print("equal to numpy, but the bytes counted are NOT those of the formula")
    else:
        out.print(
            f"proved: C, dA and dB equal numpy's within {limit:.0e}, bytes counted = formula on every rank"
        )
    return largest <= limit and not wrong


def timed(rt: Runtime, records: Sequence[BenchmarkRecord], file: Path | None) -> bool:
    """Write the records of --benchmark, print the largest difference of the compared rows."""
    if rt.rank == 0:
        write_records(file, [r.as_json() for r in records])
    worst = max(r.largest_difference or 0.0 for r in records)
    console(rt).print(f"some rows of each C differ from numpy's by {worst:.1e} at the most")
    return all(bool(r.equal) for r in records)
