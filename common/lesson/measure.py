"""Timing of steps in turn, so that a drift of the machine's speed affects all alike, and its records.

measured = in_turn({"ours": step_a, "theirs": step_b}, rounds=7, group=rt.world)
measured["ours"].seconds      # one number per round: the slowest rank's, between barriers
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger
from common.utils.profiler import peak_resident


def spread(seconds: Sequence[float]) -> float:
    """Return (max - min) / median."""
    return (max(seconds) - min(seconds)) / statistics.median(seconds)


@dataclass
class Measured:
    """Results per round: seconds of the slowest rank, most seconds that a rank was blocked, bytes sent.

    The bytes are those of this rank.
    """

    seconds: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    by_axis: list[dict[str, float]] = field(default_factory=list)
    """Seconds that this rank was blocked along each axis."""

    def per_step(self, steps: int) -> Measured:
        """Return the results of one step, where each round had `steps` of them."""
        seconds, blocked, sent = ([x / steps for x in of] for of in (self.seconds, self.blocked, self.sent))
        by_axis = [{axis: x / steps for axis, x in of.items()} for of in self.by_axis]
        return Measured(seconds, blocked, sent, by_axis)

    @property
    def median(self) -> float:
        """Median seconds of a round."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(max - min) / median of the seconds."""
        return spread(self.seconds)


def in_turn(
    cases: dict[str, Callable[[], object]], rounds: int, group: Group, warm_up: int = 1, device: str = "cpu"
) -> dict[str, Measured]:
    """Call every case once per round, for `rounds` rounds, after `warm_up` rounds that do not count."""
    measured = {name: Measured() for name in cases}
    for round in range(-warm_up, rounds):
        for name, case in cases.items():
            comm.barrier(group)
            with Ledger() as ledger:
                start = time.perf_counter()
                case()
                if device != "cpu":
                    torch.cuda.synchronize()
                took = torch.tensor([time.perf_counter() - start, ledger.seconds()], device=device)
            comm.all_reduce(took, group, "max")
            if round >= 0:
                seconds, blocked = took.tolist()
                measured[name].seconds.append(seconds)
                measured[name].blocked.append(blocked)
                measured[name].sent.append(float(ledger.bytes()))
                measured[name].by_axis.append(ledger.seconds_by_axis())
    return measured


def peak_memory(group: Group) -> int:
    """Return the peak resident set in bytes, or the peak GPU memory; the maximum over ranks."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak = torch.tensor(torch.cuda.max_memory_allocated(), device="cuda")
    else:
        peak = torch.tensor(peak_resident())
    comm.all_reduce(peak, group, "max")
    return int(peak.item())


@dataclass
class BenchmarkRecord:
    """One line of --json: the case, its speed and the bytes it sent; times in seconds, sizes in bytes.

    tokens_per_step and flop_per_step are of all ranks together, bytes are per rank and step.
    """

    strategy: str
    implementation: str
    language: str
    ranks: int
    backend: str
    dtype: str
    model: str
    parameters: int
    tokens_per_step: int
    flop_per_step: int
    step_seconds: list[float]
    communication_seconds: float | None
    bytes_counted: float | None
    bytes_formula: float | None
    peak_memory_bytes: int
    scaling: str
    seconds_by_axis: dict[str, float] | None = None
    """Seconds blocked in communication along each axis, the mean over the ranks."""
    equal: bool | None = None
    largest_difference: float | None = None
    differences: dict[str, float] | None = None
    """Largest difference with each optimizer."""

    def as_json(self) -> dict[str, Any]:
        """Return the record with the number of steps and the versions that ran it."""
        versions = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "threads": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
        }
        return {**asdict(self), "steps": len(self.step_seconds), "versions": versions}
