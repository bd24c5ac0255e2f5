"""Two stored runs side by side: which cases took longer, and whether the difference is more than their spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.benchmarks.measures import Timing, timings
from common.benchmarks.tables import Row, Table, digits, names, text

Record = Mapping[str, Any]
Key = tuple[str, tuple[str, str, str], tuple[str, str, float | None]]


@dataclass(frozen=True)
class Pair:
    """The same case in both runs."""

    first: Timing
    second: Timing

    @property
    def ratio(self) -> float:
        """Second over first, of the medians."""
        return self.second.seconds / self.first.seconds

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest ratio that two of their steps have."""
        a, b = self.first.step_seconds, self.second.step_seconds
        return min(b) / max(a), max(b) / min(a)

    @property
    def verdict(self) -> str:
        """Empty where some step of one took as long as some of the other: that tells nothing apart."""
        low, high = self.bounds
        return "slower" if low > 1 else "faster" if high < 1 else ""


def _by_case(records: Iterable[Record]) -> dict[Key, Timing]:
    return {(t.case, t.who, t.work): t for t in timings(records) if t.purpose == "time"}


def pairs(first: Sequence[Record], second: Sequence[Record]) -> tuple[list[Pair], list[str]]:
    """What both runs timed, in the first one's order; the names of what only one of them did."""
    a, b = _by_case(first), _by_case(second)
    alone = sorted({f"{case} ({who[0]})" for case, who, _ in a.keys() ^ b.keys()})
    return [Pair(a[key], b[key]) for key in a if key in b], alone


def table(both: Sequence[Pair], title: str, alone: Sequence[str] = ()) -> Table:
    """A row for each case and implementation; marked where the second run is slower beyond the spread."""
    heads = (
        "implementation",
        ">ranks",
        "scaling",
        ">first (ms)",
        ">second (ms)",
        ">ratio",
        ">from",
        ">to",
        "second is",
    )
    made = Table(title, heads)
    made.note = (
        "Median of a step in each run, and second / first; from and to: the least and the largest ratio of two of "
        "their steps. The last column speaks only where no step of one run took as long as any of the other."
    )
    if alone:
        made.note += f" Timed in one of the runs only: {', '.join(alone)}."
    called = names([t for pair in both for t in (pair.first, pair.second)])
    for pair in both:
        low, high = pair.bounds
        cells = [
            called[pair.first.who],
            str(pair.first.ranks),
            pair.first.scaling,
            digits(pair.first.seconds, 1e3),
            digits(pair.second.seconds, 1e3),
            *(text(ratio, "{:.2f}") for ratio in (pair.ratio, low, high)),
            pair.verdict,
        ]
        commands = dict.fromkeys((pair.first.command, pair.second.command))
        made.rows.append(Row(cells, tuple(commands), bad=pair.verdict == "slower"))
    return made
