"""Computations of the report from the records; no other module computes any."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, get_type_hints

from common.launch.command_line import Count, Within, fits
from common.lesson.measure import spread

Finite = Annotated[float, Within(-sys.float_info.max, sys.float_info.max)]
Seconds = Annotated[float, Within(sys.float_info.min, sys.float_info.max)]

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Timing:
    """The steps of one implementation on one number of ranks. None: not measured."""

    strategy: str
    implementation: str
    language: str
    backend: str
    dtype: str
    model: str
    ranks: Count
    step_seconds: Sequence[Seconds]  # of each step, the slowest rank's
    scaling: Scaling = "strong"
    tokens_per_step: Finite | None = None  # of all ranks together, like flop_per_step
    flop_per_step: Finite | None = None
    communication_seconds: Finite | None = None  # exposed, per step
    seconds_by_axis: Mapping[str, Finite] | None = None  # the same by axis, mean of the ranks
    bytes_counted: Finite | None = None  # per rank and step
    bytes_formula: Finite | None = None
    peak_memory_bytes: Finite | None = None  # the largest rank's
    equal: bool | None = None  # to one device
    largest_difference: float | None = None  # may be NaN or infinite
    chapter: str = ""
    command: str = ""
    purpose: str = "time"
    case: str = ""
    cores: Count | None = None  # of the hosts that it ran on
    peaks: Mapping[str, Mapping[str, Finite]] | None = None  # of one core: see peaks.py

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return median(self.step_seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return spread(self.step_seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks together."""
        return None if self.tokens_per_step is None else self.tokens_per_step / self.seconds

    @property
    def gflops(self) -> float | None:
        """10^9 operations per second of all ranks together."""
        return None if self.flop_per_step is None else self.flop_per_step / self.seconds / 1e9

    @property
    def peak(self) -> float | None:
        """10^9 operations per second of one core with the BLAS of this implementation; None if unknown."""
        if self.backend == "nccl":
            return None  # peaks are of processors
        blas = "C++" if self.language == "cpp-mpi" else "torch"
        rate = (self.peaks or {}).get(blas, {}).get(self.dtype)
        return rate / 1e9 if rate else None

    @property
    def peak_share(self) -> float | None:
        """Share of the peak of as many cores as the ranks can use at once."""
        if self.gflops is None or self.peak is None:
            return None
        return self.gflops / self.peak / min(self.ranks, self.cores or self.ranks)

    @property
    def communication_share(self) -> float | None:
        """Share of a step in which a rank only waits for messages."""
        return None if self.communication_seconds is None else self.communication_seconds / self.seconds

    @property
    def who(self) -> tuple[str, str, str]:
        """Key of the implementation: (implementation, language, backend)."""
        return self.implementation, self.language, self.backend

    @property
    def one_rank_tokens(self) -> float | None:
        """Tokens per step of the one-rank run with which this run is compared."""
        if self.tokens_per_step is None or self.scaling == "strong":
            return self.tokens_per_step
        return self.tokens_per_step / self.ranks

    @property
    def work(self) -> tuple[str, str, float | None]:
        """Key of the work: (model, dtype, one_rank_tokens); timings with equal keys can be compared."""
        return self.model, self.dtype, self.one_rank_tokens


TIMED = tuple(field.name for field in fields(Timing) if field.default is MISSING)
RATES = ("algorithm_bandwidth", "bus_bandwidth")
KINDS: dict[
    str, tuple[str, ...]
] = {  # field that only one kind of record has -> all fields that this kind needs
    "step_seconds": TIMED,
    "bus_bandwidth": ("primitive", "backend", "ranks", "bytes", "seconds", *RATES, "correct"),
    "timelines": ("schedule", "model", "dtype", "backend", "ranks", "micro_batches", "bubble", "timelines"),
    "error": ("ranks", "scaling"),
}
KEPT = ("chapter", "case", "command", "purpose", "commit", "date", "machine")  # what the benchmark adds
SHARES = ("formula", "simulated", "with measured times", "measured")  # of a bubble
Work = tuple[Finite, Finite, str, str]  # the fields of a visualizer.Interval
TYPES: dict[str, Any] = {
    **get_type_hints(Timing, include_extras=True),
    **dict.fromkeys((*KEPT, "primitive", "schedule", "error"), str),
    **dict.fromkeys(("bytes", *RATES), Finite),
    "correct": bool,
    "seconds": Sequence[Seconds],
    "micro_batches": Count,
    "bubble": Mapping[str, Finite | None],
    "timelines": Mapping[str, Mapping[str, Sequence[Work]]],
    "elapsed": Finite | None,
    "machine": Mapping[str, str],
}


def read(file: Path, added: Sequence[str] = ()) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the good records of a file, which also have the fields `added`, and a message per other line."""
    good, wrong = [], []
    for number, line in enumerate(file.read_text(errors="replace").splitlines() if file.exists() else [], 1):
        try:
            record = json.loads(line)
            why = problem(record, added)
        except (ValueError, RecursionError):
            why = "is not JSON"
        if why:
            wrong.append(f"record {number} {why}")
        else:
            good.append(record)
    return good, wrong


def problem(record: Any, added: Sequence[str] = ()) -> str:
    """Return why a record is no Timing, bandwidth, schedule or failure; empty if it is one."""
    if not isinstance(record, dict):
        return "is not an object"
    kinds = [needed for mark, needed in KINDS.items() if mark in record] or [TIMED]
    for key in (*added, *(key for needed in kinds for key in needed)):
        if key not in record:
            return f"lacks {key!r}"
    for key, hint in TYPES.items():
        if key in record and not fits(record[key], hint):
            return f"has {key} = {record[key]!r:.40}"
    return ""


def timings(records: Iterable[Mapping[str, Any]]) -> list[Timing]:
    """Return the Timings of the records that time steps."""
    return [
        Timing(**{field.name: record[field.name] for field in fields(Timing) if field.name in record})
        for record in records
        if "step_seconds" in record
    ]


def speed_up(timing: Timing, among: Sequence[Timing]) -> float | None:
    """Return the throughput over that of one rank, of the same implementation and work; None without one.

    Meshes of one model are compared with "one rank", which is an implementation of its own.
    Strong scaling: T(1) / T(n) for the same tokens. Weak: n T(1) / T(n), n times the tokens.
    """
    ours = [
        t
        for t in among
        if t.ranks == 1
        and (t.who[:2] == timing.who[:2] or (t.strategy, t.implementation) == (timing.strategy, "one rank"))
        and t.work == timing.work
        and t.purpose == timing.purpose
    ]
    if not ours:
        return None
    one = min(ours, key=lambda t: t.backend != timing.backend)
    return one.seconds / timing.seconds * (timing.ranks if timing.scaling == "weak" else 1)


def alone(timing: Timing, among: Sequence[Timing]) -> Timing | None:
    """Return a run of this implementation alone, whose peak memory is its own; None if there is none."""
    alike = [t for t in among if t.purpose == "memory" and _kind(t) == _kind(timing)]
    for t in (timing, *alike):
        if len({other.who for other in among if other.command == t.command}) == 1:
            return t
    return None


def _kind(t: Timing) -> tuple[tuple[str, str, str], int, str, str]:
    return t.who, t.ranks, t.model, t.dtype


def compared(timing: Timing, among: Sequence[Timing]) -> list[Timing]:
    """Return all runs that compared this implementation with one device."""
    return [t for t in among if t.who[:2] == timing.who[:2] and t.equal is not None]


@dataclass(frozen=True)
class Pair:
    """The same case in both runs."""

    first: Timing
    second: Timing

    @property
    def ratio(self) -> float:
        """Ratio of the medians, second over first."""
        return self.second.seconds / self.first.seconds

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest ratio between a step of the second run and a step of the first."""
        a, b = self.first.step_seconds, self.second.step_seconds
        return min(b) / max(a), max(b) / min(a)

    @property
    def verdict(self) -> str:
        """`slower` or `faster`; empty if the step times of the two runs overlap."""
        low, high = self.bounds
        return "slower" if low > 1 else "faster" if high < 1 else ""


def _by_case(records: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], Timing]:
    return {(t.case, t.who, t.work): t for t in timings(records) if t.purpose == "time"}


def pairs(
    first: Iterable[Mapping[str, Any]], second: Iterable[Mapping[str, Any]]
) -> tuple[list[Pair], list[str]]:
    """Return the cases that both runs timed, in the first one's order, and the names of all others."""
    a, b = _by_case(first), _by_case(second)
    alone = sorted({f"{case} ({who[0]})" for case, who, _ in a.keys() ^ b.keys()})
    return [Pair(a[key], b[key]) for key in a if key in b], alone
