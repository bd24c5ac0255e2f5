"""A rank that a competitor slows to half its speed, with even pieces and with balanced ones.

    mpirun -np 2 --bind-to core python common/tensors/examples/balance.py

The last rank shares its core with a process that does nothing but compute. Each step multiplies this rank's rows by a
matrix; the balancer sees the seconds of all ranks and moves rows. Printed beside the times: the proportional optimum,
total rows / sum of the measured speeds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import torch

from common import comm
from common.launch.command_line import Size, Within
from common.launch.runtime import Runtime
from common.lesson.runner import LessonOptions, console, run
from common.tensors import DistributedTensor, Grid, Replicate, Shard, uniform
from common.tensors.balance import Balancer
from common.utils.pages import keep_freed_memory


@dataclass
class BalanceOptions(LessonOptions, without=("data", "trace", "plot", "debug", "check", "json", "dtype")):
    """Options of the demonstration."""

    steps: Annotated[int, Within(5, 10**6)] = 30
    """Steps with even pieces, and again with balanced ones."""
    rows: Size = 6000
    """Rows of the left matrix."""
    width: Size = 700
    """Columns of the left matrix, and both lengths of the right one."""


def step(x: DistributedTensor, w: torch.Tensor) -> float:
    """Multiply this rank's rows; return the seconds that it took."""
    start = time.perf_counter()
    for _ in range(4):
        torch.mm(x.local, w)
    return time.perf_counter() - start


def timed(x: DistributedTensor, w: torch.Tensor, steps: int, balancer: Balancer | None = None) -> list[float]:
    """Run steps, in which the balancer may move rows; return the seconds of the slowest rank in each."""
    slowest = []
    for _ in range(steps):
        comm.barrier(x.grid.world)
        seconds = comm.everyones(step(x, w), x.grid.world)
        slowest.append(max(seconds))
        if balancer is not None and balancer.observe(seconds):
            x = x.redistribute(Shard(0, balancer.sizes))
    return slowest


def main(rt: Runtime, o: BalanceOptions) -> bool:
    """Print the median step with even and with balanced pieces, and the optimum; all medians of the last steps."""
    keep_freed_memory()
    grid = Grid(rt.world)
    x = uniform((o.rows, o.width), grid, Shard(0))
    w = uniform((o.width, o.width), grid, Replicate()).local
    competitor = None
    if rt.rank == rt.world_size - 1:
        competitor = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(competitor.pid, os.sched_getaffinity(0))
    try:
        even = timed(x, w, o.steps)
        balancer = Balancer(o.rows, rt.world_size)
        last = timed(x, w, 2 * o.steps, balancer)[o.steps :]
    finally:
        if competitor is not None:
            competitor.kill()
            competitor.wait()
    costs = [c for c in balancer.seconds_per_row if c is not None]
    optimum = o.rows / sum(1 / c for c in costs)
    out = console(rt)
    out.print(f"even pieces      {statistics.median(even) * 1e3:.1f} ms")
    out.print(f"balanced pieces  {statistics.median(last) * 1e3:.1f} ms, rows {list(balancer.sizes)}")
    out.print(f"optimum          {optimum * 1e3:.1f} ms, reached {optimum / statistics.median(last):.0%}")
    return True


if __name__ == "__main__":
    run(main, BalanceOptions)
