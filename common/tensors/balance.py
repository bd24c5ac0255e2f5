"""Pieces in proportion to what each rank computes in a second, on machines whose ranks differ.

    balancer = Balancer(x.shape[0], measure_speeds(grid, work))
    x = x.redistribute(Shard(0, balancer.sizes))
    for step in range(100):
        ...                                    # this rank's work took `seconds`
        if balancer.observe(everyones(seconds, grid.world)):
            x = x.redistribute(Shard(0, balancer.sizes))

A rank with rate v_i gets v_i / sum(v) of the rows: all ranks then end at the same time, in total / sum(v). `sizes`
change only if the step would become shorter by a share `hysteresis`, so that noise moves no rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from common import comm
from common.comm import ledger
from common.errors import UsageError
from common.tensors.grid import Grid


def proportional(total: int, rates: Sequence[float]) -> list[int]:
    """Return lengths that add up to `total`, in proportion to the rates; the largest fractions are rounded up.

    Raises UsageError for a rate that is not positive and finite, and for a negative total.
    """
    if total < 0:
        raise UsageError(f"a total of {total}: give 0 or more")
    if not rates or not all(math.isfinite(r) and r > 0 for r in rates):
        raise UsageError(f"rates {list(rates)}: give a positive number for each rank")
    shares = [total * r / math.fsum(rates) for r in rates]
    sizes = [math.floor(s) for s in shares]
    order = sorted(range(len(rates)), key=lambda i: sizes[i] - shares[i])
    for i in order[: total - sum(sizes)]:
        sizes[i] += 1
    return sizes


def measure_speeds(grid: Grid, work: Callable[[], object], repeats: int = 5) -> list[float]:
    """Return the calls of `work` per second of every rank, all at work at once. work communicates nothing.

    Each rank calls it for the same time, so that a slow rank is slow for as long as the others measure.
    """
    with ledger.uncounted(), grid.operation(f"measure_speeds({repeats})"):
        grid.meet()
        start = time.perf_counter()
        work()
        work()
        slowest = max(comm.everyones((time.perf_counter() - start) / 2, grid.world))
        comm.barrier(grid.world)
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < repeats * slowest:
            work()
            calls += 1
        return comm.everyones(calls / (time.perf_counter() - start), grid.world)


class Balancer:
    """Lengths of all ranks' pieces of `total` rows: `sizes`.

    speeds: rows per second of each rank, in any unit, or the number of ranks for equal pieces. hysteresis: the share by
    which a step must become shorter for `sizes` to change. memory: weight of earlier measurements, from 0 to below 1.
    All ranks observe the same seconds, and so have the same sizes.
    """

    def __init__(
        self,
        total: int,
        speeds: Sequence[float] | int,
        hysteresis: float = 0.05,
        memory: float = 0.5,
    ) -> None:
        if not 0 <= memory < 1 or hysteresis < 0:
            raise UsageError(
                f"memory {memory} and hysteresis {hysteresis}: give 0 <= memory < 1, hysteresis >= 0"
            )
        self.sizes = tuple(proportional(total, [1.0] * speeds if isinstance(speeds, int) else speeds))
        self.total, self.hysteresis, self.memory = total, hysteresis, memory
        self.seconds_per_row: list[float | None] = [None] * len(self.sizes)

    def observe(self, seconds: Sequence[float]) -> bool:
        """Take the seconds that each rank worked on its piece; return True if `sizes` changed.

        A rank without rows tells nothing; it keeps the rate that it had, or gets the mean of the others. Raises
        UsageError unless there is a number for each rank.
        """
        if len(seconds) != len(self.sizes):
            raise UsageError(f"{len(seconds)} seconds: give one number for each of {len(self.sizes)} ranks")
        for i, (rows, took) in enumerate(zip(self.sizes, seconds, strict=True)):
            if rows and took > 0:
                before, now = self.seconds_per_row[i], took / rows
                mixed = now if before is None else self.memory * before + (1 - self.memory) * now
                self.seconds_per_row[i] = mixed
        known = [s for s in self.seconds_per_row if s is not None]
        if not known:
            return False
        costs = [s if s is not None else sum(known) / len(known) for s in self.seconds_per_row]
        better = tuple(proportional(self.total, [1 / c for c in costs]))
        now, then = (max(n * c for n, c in zip(sizes, costs, strict=True)) for sizes in (self.sizes, better))
        if then * (1 + self.hysteresis) >= now:
            return False
        self.sizes = better
        return True
