"""Chunks that travel while others are computed: the closed form beside measured times.

    mpirun -np 2 --bind-to core python common/tensors/examples/overlap.py

Products in 1, 2, 4 ... panels, and a convolution whose halo comes first or travels while the interior is computed.
Predicted: T(n) of `overlap`. Where all cores compute, a message takes its time from them, so that the gain stays below
the closed form's, which assumes that they do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch

from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.measure import in_turn
from common.lesson.runner import LessonOptions, console, run
from common.tensors import Grid, Rates, Replicate, Shard, normal
from common.tensors.calibrate import calibrate
from common.tensors.convolution import Convolution
from common.tensors.overlap import best_chunks, seconds
from common.tensors.pairwise import Pair
from common.tensors.panels import inner_in_panels, inner_terms, panel_seconds, rows_in_panels, rows_terms
from common.tensors.rates import Term
from common.tensors.window import plans_of
from common.utils.pages import keep_freed_memory

PANELS = (1, 2, 4, 8, 16, 32)


@dataclass
class OverlapOptions(
    LessonOptions, without=("steps", "data", "trace", "plot", "debug", "check", "json", "dtype")
):
    """Options of the comparison."""

    rounds: Annotated[int, Within(5, 10**4)] = 7
    """Times that each call is timed, in turn with the others."""
    rows: Annotated[int, Within(64, 10**5)] = 2048
    """Rows of the matrices; the images have an eighth of them."""
    rates: str = ""
    """File of calibrate.py; default: measure now."""


def products(grid: Grid, n: int) -> dict[str, tuple[Callable[[int], object], tuple[Term, Term, Term]]]:
    """Return for each way in panels a call with so many of them, and its terms."""
    rows, more = (normal((n, n), grid, Shard(0), seed) for seed in (1, 2))
    by_rows, by_inner = (Pair(a, more, ("mk", "kn", "mn")) for a in (rows, rows.redistribute(Shard(1))))
    return {
        "rows, b in panels": (lambda count: rows_in_panels(by_rows, count).run(), rows_terms(by_rows)),
        "inner, sum in panels": (
            lambda count: inner_in_panels(by_inner, count).run(),
            inner_terms(by_inner),
        ),
    }


def main(rt: Runtime, o: OverlapOptions) -> bool:
    """Print a table of predicted and measured times for each operation."""
    keep_freed_memory()
    grid, out = Grid(rt.world), console(rt)
    grid.rates = Rates.load(o.rates) if o.rates else calibrate(grid)
    heads = ("panels", ">predicted ms", ">measured ms", ">spread")
    for name, (call, terms) in products(grid, o.rows).items():
        with torch.no_grad():
            found = in_turn({str(n): partial(call, n) for n in PANELS}, o.rounds, rt.world)
        compute, communication, overhead = panel_seconds(grid.rates, *terms)
        predicted = {n: seconds(n, compute, communication, overhead) for n in PANELS}
        rows = [
            (str(n), f"{predicted[n] * 1e3:.2f}", f"{m.median * 1e3:.2f}", f"{m.spread:.0%}")
            for n, m in zip(PANELS, found.values(), strict=True)
        ]
        best = best_chunks(compute, communication, overhead)
        parts = f"Tc {compute * 1e3:.2f}, Tm {communication * 1e3:.2f}, o {overhead * 1e3:.3f} ms"
        out.print(make_table(f"{name}: {parts}; n* = {best}", heads, rows))
    halo(rt, o, grid)
    return True


def halo(rt: Runtime, o: OverlapOptions, grid: Grid) -> None:
    """Print the same for a convolution: the halo first, and the interior computed meanwhile."""
    side = max(16, o.rows // 8)
    x, w = normal((2, 32, side, side), grid, Shard(2)), normal((32, 32, 3, 3), grid, Replicate())
    convolution = Convolution(2, x, w, None, 1, 1)
    split = convolution.split(["height"])
    plans = plans_of(split, x.dtype)
    if len(plans) == 1:
        return  # one rank has no halo
    names = ("halo first", "halo meanwhile")
    calls = (partial(convolution.local, x.local, w.local, split, overlapped=k) for k in (False, True))
    with torch.no_grad():
        found = in_turn(dict(zip(names, calls, strict=True)), o.rounds, rt.world)
    rows = [
        (name, f"{grid.rates.predict(plan) * 1e3:.2f}", f"{m.median * 1e3:.2f}", f"{m.spread:.0%}")
        for (name, m), plan in zip(found.items(), plans, strict=True)
    ]
    heads = ("plan", ">predicted ms", ">measured ms", ">spread")
    console(rt).print(make_table(f"conv2d of {list(x.shape)} along H", heads, rows))


if __name__ == "__main__":
    run(main, OverlapOptions)
