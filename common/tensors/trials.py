"""Random operations, and the corrections of a machine's rates that explain their times best.

Terms are measured alone, in a loop. In an operation their operands lie in other caches, memory is new, ranks wait for
one another, and Python takes its time for each way and each move. `corrected` fits a factor per kind of term, and these
times, to what the ways of random operations take.

    trials = draw(grid, TRIALS, SEEN)
    rates = corrected(rates, trials, times_of(trials, rounds=5))

Other operations show how well it predicts: `examples/costs.py`. Other programs make a machine slower for half a minute
at a time. So `times_of` runs all trials once before it runs any of them again.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from common import comm
from common.tensors.convolution import conv2d
from common.tensors.cost import Cost
from common.tensors.explain import Explanation, explain
from common.tensors.fourier import fft2
from common.tensors.grid import Grid
from common.tensors.layout import Placement, Replicate, Shard
from common.tensors.make import uniform
from common.tensors.products import bmm, matmul
from common.tensors.rates import ARITHMETIC, Rates
from common.tensors.tensor import DistributedTensor
from common.utils.environment import cores

TRIALS, SEEN = 40, "calibration"
"""Number and seed of the operations by which calibration corrects its rates; the seeds of others are numbers."""
Times = Mapping[str, float]
"""Seconds of an operation's ways by name."""


@dataclass(frozen=True)
class Trial:
    """An operation on operands in random layouts."""

    name: str
    operation: Callable[..., DistributedTensor]
    operands: Sequence[DistributedTensor]
    options: dict[str, Any]

    def explained(self, measure: int = 0) -> Explanation:
        """Return what each way to split the operation costs; measure: how often to run each."""
        return explain(self.operation, *self.operands, measure=measure, **self.options)


def draw(grid: Grid, count: int, seed: int | str, device: str = "cpu") -> list[Trial]:
    """Return products, batched ones, convolutions and transforms that take milliseconds, the same on all ranks."""
    numbers = random.Random(seed)
    return [_drawn(grid, numbers, device) for _ in range(count)]


def _drawn(grid: Grid, numbers: random.Random, device: str) -> Trial:
    def length(low: int, high: int) -> int:
        return int(low * (high / low) ** numbers.random())

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> DistributedTensor:
        placed: list[Placement] = [Replicate(), *(Shard(d) for d in range(len(shape)))]
        return uniform(shape, grid, numbers.choice(placed), dtype=dtype, device=device)

    kind = numbers.choice(["matmul", "matmul", "bmm", "conv2d", "fft2"])
    if kind == "matmul":
        M, K, N = (length(100, 2000) for _ in range(3))
        return Trial(f"matmul {M} {K} {N}", matmul, (tensor(M, K), tensor(K, N)), {})
    if kind == "bmm":
        B, M, K, N = length(4, 64), length(32, 400), length(32, 400), length(32, 400)
        return Trial(f"bmm {B} {M} {K} {N}", bmm, (tensor(B, M, K), tensor(B, K, N)), {})
    if kind == "conv2d":
        N, C, side = length(2, 8), length(16, 64), length(24, 96)
        w = uniform((C, C, 3, 3), grid, Replicate(), device=device)
        return Trial(f"conv2d {N} {C} {side}", conv2d, (tensor(N, C, side, side), w), {"padding": 1})
    M, N = length(128, 2048), length(128, 2048)
    return Trial(f"fft2 {M} {N}", fft2, (tensor(M, N, dtype=torch.complex64),), {})


def times_of(trials: Sequence[Trial], rounds: int) -> list[Times]:
    """Return, for each trial, the median seconds of its ways by name. All ranks call it.

    A round runs every trial, in an order of its own: a time when the machine is slow hits trials of all kinds. Of each
    trial it runs every way that fits into memory twice, and counts the second time.
    """
    seconds: list[dict[str, list[float]]] = [{} for _ in trials]
    for number in range(rounds):
        for i in random.Random(number).sample(range(len(trials)), len(trials)):
            for c in trials[i].explained(measure=1).candidates:
                if c.measured is not None:
                    seconds[i].setdefault(c.way.name, []).append(c.measured)
    return [{name: statistics.median(found) for name, found in of.items()} for of in seconds]


def corrected(rates: Rates, trials: Sequence[Trial], times: Sequence[Times]) -> Rates:
    """Return the rates with corrections that explain the trials' times. All ranks call it.

    A rank that has one core carries its messages with it: none travels while the core computes.
    """
    first = trials[0].operands[0]
    least = min(comm.everyones(cores(), first.grid.world))
    hidden = 1.0 if least == 1 and first.device.type == "cpu" else None
    costs, seconds = list[Cost](), list[float]()
    for trial, by_name in zip(trials, times, strict=True):
        for c in trial.explained().candidates:
            if c.way.name in by_name:
                costs.append(c.way.cost)
                seconds.append(by_name[c.way.name])
    found = fitted_corrections(rates, costs, seconds, hidden)
    return replace(rates, corrections=comm.everyones(found, first.grid.world)[0])


def fitted_corrections(
    rates: Rates, costs: Sequence[Cost], seconds: Sequence[float], hidden: float | None = None
) -> dict[str, float]:
    """Return the corrections with which the predicted times differ least from the measured ones, relatively.

    hidden: this correction, where it is known.
    """
    kinds = sorted({t.kind for cost in costs for t in cost.terms})
    starts = ["move", *(f"way {kind}" for kind in kinds if kind in ARITHMETIC)]
    start = np.log([*(1e-5 for _ in starts), 0.5, *(1.0 for _ in kinds)])

    def named(x: np.ndarray[Any, Any]) -> dict[str, float]:
        found = dict(zip((*starts, "hidden", *kinds), map(float, np.exp(x)), strict=True))
        return found if hidden is None else found | {"hidden": hidden}

    def log_errors(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        tried = replace(rates, corrections=named(x))
        return np.array(
            [np.log(tried.predict(cost.terms) / s) for cost, s in zip(costs, seconds, strict=True)]
        )

    # times that others disturb count little: the loss grows with the difference, not its square
    bounds = start - 7, start + 7  # a factor of 1000
    return named(least_squares(log_errors, start, bounds=bounds, loss="soft_l1", f_scale=0.1).x)
