"""Predicted against measured times, on random shapes that calibration did not see, and the regret of the choice.

    mpirun -np 2 --bind-to core python common/tensors/examples/costs.py --shapes 60

Each shape is a product, a batched product, a convolution or a transform with operands in random layouts. Every way
that the library has for it is predicted and then measured. Regret: by what share the chosen way is slower than the
fastest.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.runner import LessonOptions, console, run
from common.tensors import Grid, Rates, Replicate, Shard, bmm, conv2d, explain, fft2, matmul, uniform
from common.tensors.calibrate import calibrate
from common.tensors.explain import Explanation
from common.tensors.layout import Placement
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


def drawn(grid: Grid, numbers: random.Random) -> tuple[str, Callable[[int], Explanation]]:
    """Return a random operation, described, and a function that explains it."""

    def length(low: int, high: int) -> int:
        return int(low * (high / low) ** numbers.random())

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        placed: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
        cut = numbers.choice(placed)
        return uniform(shape, grid, cut, dtype=dtype)

    kind = numbers.choice(["matmul", "matmul", "bmm", "conv2d", "fft2"])
    if kind == "matmul":
        M, K, N = (length(100, 2000) for _ in range(3))
        a, b = tensor(M, K), tensor(K, N)
        return f"matmul {M} {K} {N}", lambda k: explain(matmul, a, b, measure=k)
    if kind == "bmm":
        B, M, K, N = length(4, 64), length(32, 400), length(32, 400), length(32, 400)
        a, b = tensor(B, M, K), tensor(B, K, N)
        return f"bmm {B} {M} {K} {N}", lambda k: explain(bmm, a, b, measure=k)
    if kind == "conv2d":
        N, C, side = length(2, 8), length(16, 64), length(24, 96)
        a, b = tensor(N, C, side, side), uniform((C, C, 3, 3), grid, Replicate())
        return f"conv2d {N} {C} {side}", lambda k: explain(conv2d, a, b, padding=1, measure=k)
    M, N = length(128, 2048), length(128, 2048)
    a = tensor(M, N, dtype=torch.complex64)
    return f"fft2 {M} {N}", lambda k: explain(fft2, a, measure=k)


def main(rt: Runtime, o: CostOptions) -> bool:
    """Print predicted and measured times of the chosen ways, the median error and the mean regret."""
    keep_freed_memory()
    grid, numbers = Grid(rt.world), random.Random(o.seed)
    grid.rates = Rates.load(o.rates) if o.rates else calibrate(grid)
    rows, errors, regrets = [], list[float](), list[float]()
    for _ in range(o.shapes):
        what, explained = drawn(grid, numbers)
        found = explained(o.rounds)
        for c in found.candidates:
            assert c.measured is not None
            error = (c.predicted - c.measured) / c.measured
            errors.append(abs(error))
            if c.way.name == found.chosen:
                times = f"{c.predicted * 1e3:.3f}", f"{c.measured * 1e3:.3f}", f"{error:+.0%}"
                rows.append((what, c.way.name, *times, f"{found.regret:.1%}"))
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
