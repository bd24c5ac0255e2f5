"""Predicted against measured times, on random shapes that calibration did not see, and the regret of the choice.

    mpirun -np 2 --bind-to core python common/tensors/examples/costs.py --shapes 60
    mpirun -np 2 --bind-to core python common/tensors/examples/costs.py --shapes 60 --rates machine.json

Each shape is a product, a batched product, a convolution or a transform with operands in random layouts. Every way
that the library has for it is predicted and then measured. Regret: by what share the chosen way is slower than the
fastest. Calibration corrects its rates by other random operations. They run in turn with these, so that other programs
on the machine slow both alike. With --rates the corrections come from another time.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Annotated

from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.runner import LessonOptions, console, run
from common.tensors import Grid, Rates
from common.tensors.calibrate import calibrate
from common.tensors.trials import SEEN, TRIALS, corrected, draw, times_of
from common.utils.pages import keep_freed_memory


@dataclass
class CostOptions(
    LessonOptions, without=("steps", "data", "trace", "plot", "debug", "check", "json", "dtype")
):
    """Options of the comparison."""

    shapes: Annotated[int, Within(1, 1000)] = 60
    """Number of random shapes."""
    rounds: Annotated[int, Within(3, 10**4)] = 5
    """Times that each way is measured, once in each of as many rounds over all shapes."""
    rates: str = ""
    """File of calibrate.py; default: measure now."""


def main(rt: Runtime, o: CostOptions) -> bool:
    """Print predicted and measured times of the chosen ways, the median error and the mean regret."""
    keep_freed_memory()
    grid = Grid(rt.world)
    grid.rates = Rates.load(o.rates) if o.rates else calibrate(grid, trials=0)
    seen, unseen = draw(grid, 0 if o.rates else TRIALS, SEEN), draw(grid, o.shapes, o.seed)
    times = times_of([*seen, *unseen], o.rounds)
    if seen:
        grid.rates = corrected(grid.rates, seen, times[: len(seen)])
    rows, errors, regrets = [], list[float](), list[float]()
    for trial, seconds in zip(unseen, times[len(seen) :], strict=True):
        found = trial.explained()
        for c in found.candidates:
            if c.way.name not in seconds:  # needs more memory than there is
                continue
            measured = seconds[c.way.name]
            error = (c.predicted - measured) / measured
            errors.append(abs(error))
            if c.way.name == found.chosen:
                regrets.append(measured / min(seconds.values()) - 1)
                shown = f"{c.predicted * 1e3:.3f}", f"{measured * 1e3:.3f}", f"{error:+.0%}"
                rows.append((trial.name, c.way.name, *shown, f"{regrets[-1]:.1%}"))
    heads = ("operation", "chosen way", ">predicted ms", ">measured ms", ">error", ">regret")
    console(rt).print(make_table(f"{o.shapes} shapes on {rt.world_size} rank(s)", heads, rows))
    console(rt).print(
        f"{len(errors)} ways: median |predicted - measured| / measured {statistics.median(errors):.1%}; "
        f"regret: median {statistics.median(regrets):.1%}, mean {statistics.mean(regrets):.1%}"
    )
    return True


if __name__ == "__main__":
    run(main, CostOptions)
