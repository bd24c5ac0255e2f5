"""Predicted against measured times, on random shapes that calibration did not see, and the regret of the choice.

    mpirun -np 2 --bind-to core python common/tensors/examples/costs.py --shapes 60

Each shape is a product, a batched product, a convolution or a transform with operands in random layouts. Every way
that the library has for it is predicted and then measured. Regret: by what share the chosen way is slower than the
fastest.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import Annotated

from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.runner import LessonOptions, console, run
from common.tensors import Grid, Rates, explain
from common.tensors.calibrate import calibrate
from common.tensors.trials import drawn
from common.utils.pages import keep_freed_memory


@dataclass
class CostOptions(
    LessonOptions, without=("steps", "data", "trace", "plot", "debug", "check", "json", "dtype")
):
    """Options of the comparison."""

    shapes: Annotated[int, Within(1, 10**5)] = 60
    """Number of random shapes."""
    rounds: Annotated[int, Within(3, 10**4)] = 5
    """Times that each way is measured."""
    rates: str = ""
    """File of calibrate.py; default: measure now."""


def main(rt: Runtime, o: CostOptions) -> bool:
    """Print predicted and measured times of the chosen ways, the median error and the mean regret."""
    keep_freed_memory()
    grid, numbers = Grid(rt.world), random.Random(o.seed)
    grid.rates = Rates.load(o.rates) if o.rates else calibrate(grid)
    rows, errors, regrets = [], list[float](), list[float]()
    for _ in range(o.shapes):
        trial = drawn(grid, numbers)
        found = explain(trial.operation, *trial.operands, measure=o.rounds, **trial.options)
        for c in found.candidates:
            assert c.measured is not None
            error = (c.predicted - c.measured) / c.measured
            errors.append(abs(error))
            if c.way.name == found.chosen:
                times = f"{c.predicted * 1e3:.3f}", f"{c.measured * 1e3:.3f}", f"{error:+.0%}"
                rows.append((trial.name, c.way.name, *times, f"{found.regret:.1%}"))
        regrets.append(found.regret)
    heads = ("operation", "chosen way", ">predicted ms", ">measured ms", ">error", ">regret")
    console(rt).print(make_table(f"{o.shapes} shapes on {rt.world_size} rank(s)", heads, rows))
    console(rt).print(
        f"{len(errors)} ways: median |predicted - measured| / measured {statistics.median(errors):.1%}; "
        f"regret: median {statistics.median(regrets):.1%}, mean {statistics.mean(regrets):.1%}"
    )
    return True


if __name__ == "__main__":
    run(main, CostOptions)
