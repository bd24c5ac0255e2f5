"""Two stored runs side by side: the cases that took longer, and if the difference exceeds their spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from common.benchmarks.measures import Timing, timings
from common.benchmarks.tables import Columns, Table, digits, filled, names, text

Record = Mapping[str, Any]
Key = tuple[str, tuple[str, str, str], tuple[str, str, float | None]]


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


def _by_case(records: Iterable[Record]) -> dict[Key, Timing]:
    return {(t.case, t.who, t.work): t for t in timings(records) if t.purpose == "time"}


def pairs(first: Sequence[Record], second: Sequence[Record]) -> tuple[list[Pair], list[str]]:
    """Return the cases that both runs timed, in the first one's order, and the names of all others."""
    a, b = _by_case(first), _by_case(second)
    alone = sorted({f"{case} ({who[0]})" for case, who, _ in a.keys() ^ b.keys()})
    return [Pair(a[key], b[key]) for key in a if key in b], alone


def table(both: Sequence[Pair], title: str, alone: Sequence[str] = ()) -> Table:
    """Return a row per case and implementation, marked if the second run is slower beyond the spread."""
    called = names([t for pair in both for t in (pair.first, pair.second)])
    columns: Columns[Pair] = {
        "implementation": lambda pair: called[pair.first.who],
        ">ranks": lambda pair: str(pair.first.ranks),
        "scaling": lambda pair: pair.first.scaling,
        ">first (ms)": lambda pair: digits(pair.first.seconds, 1e3),
        ">second (ms)": lambda pair: digits(pair.second.seconds, 1e3),
        ">ratio": lambda pair: text(pair.ratio, "{:.2f}"),
        ">from": lambda pair: text(pair.bounds[0], "{:.2f}"),
        ">to": lambda pair: text(pair.bounds[1], "{:.2f}"),
        "second is": lambda pair: pair.verdict,
    }
    note = (
        "Median of a step in each run, and second / first; from and to: the least and the largest ratio of two of "
        "their steps. The last column speaks only where no step of one run took as long as any of the other."
    )
    if alone:
        note += f" Timed in one of the runs only: {', '.join(alone)}."
    commands = attrgetter("first.command", "second.command")
    return filled(title, columns, both, commands, lambda pair: pair.verdict == "slower", note)
