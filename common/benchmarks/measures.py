"""Computations of the report from the records; no other module computes any."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

Check = Callable[[Any], bool]

TEXTS = ("strategy", "implementation", "language", "backend", "dtype", "model")
NUMBERS = (
    "tokens_per_step",
    "flop_per_step",
    "communication_seconds",
    "bytes_counted",
    "bytes_formula",
    "peak_memory_bytes",
    "largest_difference",
)
BANDWIDTH = (
    "primitive",
    "backend",
    "ranks",
    "bytes",
    "seconds",
    "algorithm_bandwidth",
    "bus_bandwidth",
    "correct",
)
SCHEDULE = ("schedule", "model", "dtype", "backend", "ranks", "micro_batches", "bubble", "timelines")
TIMED = (*TEXTS, "ranks", "step_seconds")
KINDS = {  # field that only one kind of record has -> all fields that this kind needs
    "step_seconds": TIMED,
    "bus_bandwidth": BANDWIDTH,
    "timelines": SCHEDULE,
    "error": ("ranks", "scaling"),
}
KEPT = ("chapter", "case", "command", "purpose", "commit", "date", "machine")  # what the benchmark adds
SHARES = ("formula", "simulated", "with measured times", "measured")  # of a bubble


@dataclass(frozen=True)
class Timing:
    """The steps of one implementation on one number of ranks. None: not measured."""

    strategy: str
    implementation: str
    language: str
    backend: str
    dtype: str
    model: str
    ranks: int
    step_seconds: tuple[float, ...]  # of each step, the slowest rank's
    scaling: str = "strong"
    tokens_per_step: float | None = None  # of all ranks together, like flop_per_step
    flop_per_step: float | None = None
    communication_seconds: float | None = None  # exposed, per step
    seconds_by_axis: Mapping[str, float] | None = None  # the same by axis, mean of the ranks
    bytes_counted: float | None = None  # per rank and step
    bytes_formula: float | None = None
    peak_memory_bytes: float | None = None  # the largest rank's
    equal: bool | None = None  # to one device
    largest_difference: float | None = None
    chapter: str = ""
    command: str = ""
    purpose: str = "time"
    case: str = ""
    cores: int | None = None  # of the hosts that it ran on
    peaks: Mapping[str, Mapping[str, float]] | None = None  # of one core: see peaks.py

    @property
    def seconds(self) -> float:
        """Median time of a step."""
        return median(self.step_seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.step_seconds) - min(self.step_seconds)) / self.seconds

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
    for key, check in CHECKS.items():
        if key in record and not check(record[key]):
            return f"has {key} = {record[key]!r:.40}"
    return ""


def _text(value: Any) -> bool:
    """Return True for a text that can be encoded: without half of a surrogate pair."""
    return isinstance(value, str) and value == value.encode(errors="replace").decode()


def _number(value: Any) -> bool:
    """Return True for a number that is not NaN and fits a float."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and len(value) > 0 and all(map(check, value))


def _map(check: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(map(_text, value)) and all(map(check, value.values()))
    )


def _interval(value: Any) -> bool:
    """Return True for the fields of a visualizer.Interval."""
    checks = (_number, _number, _text, _text)
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(check(one) for check, one in zip(checks, value, strict=True))
    )


CHECKS: dict[str, Check] = {
    **dict.fromkeys((*TEXTS, *KEPT, "primitive", "schedule", "error"), _text),
    **dict.fromkeys((*NUMBERS, "elapsed"), _optional(_number)),
    **dict.fromkeys(("bytes", "algorithm_bandwidth", "bus_bandwidth"), _number),
    **dict.fromkeys(("ranks", "micro_batches"), _count),
    **dict.fromkeys(("step_seconds", "seconds"), _list(lambda value: _number(value) and value > 0)),
    "largest_difference": lambda value: value is None or isinstance(value, float) or _number(value),  # or NaN
    "scaling": lambda value: value in ("strong", "weak"),
    "equal": _optional(lambda value: isinstance(value, bool)),
    "correct": lambda value: isinstance(value, bool),
    "cores": _optional(_count),
    "seconds_by_axis": _optional(_map(_number)),
    "peaks": _optional(_map(_map(_number))),
    "machine": _map(_text),
    "bubble": lambda value: _map(_optional(_number))(value) and value.keys() >= set(SHARES),
    "timelines": lambda value: bool(value) and _map(_map(_list(_interval)))(value),
}


def timings(records: Iterable[Mapping[str, Any]]) -> list[Timing]:
    """Return the Timings of the records that time steps."""
    timed = [record for record in records if "step_seconds" in record]
    return [Timing(**_fields(record)) for record in timed]


def _fields(record: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in record.items() if key in Timing.__dataclass_fields__}
    return {**known, "step_seconds": tuple(record["step_seconds"])}


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
