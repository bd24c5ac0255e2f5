"""Table of a trace's operators: milliseconds of each on each rank, largest first, with what is no operator below.

    python common/utils/operators.py --file traces/step-3/trace.json

An operator's time is its own: without the operators that it calls, and on a CPU without the c10d calls in it. The
columns of a rank add up to the block that was traced: operators + exposed communication + idle, as defined in
timeline.py. The trace is one of `profiler.py` or of a run's --trace, made on CPUs: a GPU's kernels run beside the
operators that launch them.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from common.errors import UsageError
from common.launch.command_line import Checked, Within, parse
from common.launch.program import run_program
from common.launch.terminal import make_table, terminal
from common.utils.timeline import GPU, OPERATOR, WINDOW, Event


@dataclass
class Options(Checked):
    """Options: the trace, and how much of it to show."""

    file: Path = Path("profile/trace.json")
    """The trace.json of all ranks."""
    top: Annotated[int, Within(1, 1000)] = 8
    """Operators to show; the others are added up."""


@dataclass
class Times:
    """A rank's milliseconds: of each operator itself, of exposed communication, of the block; and the calls."""

    operators: dict[str, float]
    calls: Counter[str]
    exposed: float
    total: float


def read_trace(file: Path) -> list[Event]:
    """Return the events of a trace.json. Raises UsageError if it is none, or a trace of GPUs."""
    try:
        content: Any = json.loads(file.read_text())
        events: list[Event] = [e for e in content["traceEvents"] if e["ph"] == "X"]
    except OSError as error:
        raise UsageError(f"cannot read --file {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"--file {file} is not a trace of profiler.py") from None
    if not any(e["name"] == WINDOW for e in events):
        raise UsageError(f"--file {file} has no block that profiler.py traced")
    if any(e["cat"] in GPU for e in events):
        raise UsageError(f"--file {file} is of GPUs; open it in ui.perfetto.dev, which shows their kernels")
    return events


def counts(event: Event) -> bool:
    """Return True for an operator, and for a c10d call, whose time is not that of the operator around it."""
    return bool(OPERATOR.match(event["name"]) or re.match("_?c10d::", event["name"]))


def times_of(events: list[Event]) -> dict[int, Times]:
    """Return the times of each rank."""
    found = {}
    for window in sorted((e for e in events if e["name"] == WINDOW), key=lambda e: e["pid"]):
        mine = [e for e in events if e["pid"] == window["pid"]]
        end = window["ts"] + window["dur"]
        main = [
            e
            for e in mine
            if e["tid"] == window["tid"] and e["cat"] == "cpu_op" and window["ts"] <= e["ts"] < end
        ]
        exposed = sum(e["dur"] for e in mine if e["cat"] == "exposed") / 1e3
        operators: dict[str, float] = defaultdict(float)
        calls: Counter[str] = Counter()
        above: list[Event] = []  # events around the current one, outermost first
        for e in sorted(filter(counts, main), key=lambda e: (e["ts"], -e["dur"])):
            while above and above[-1]["ts"] + above[-1]["dur"] <= e["ts"]:
                above.pop()
            if above and not OPERATOR.match(above[-1]["name"]):
                continue  # what a c10d call does is communication
            if above:
                operators[above[-1]["name"]] -= e["dur"] / 1e3
            above.append(e)
            if OPERATOR.match(e["name"]):
                operators[e["name"]] += e["dur"] / 1e3
                calls[e["name"]] += 1
        found[window["pid"]] = Times(operators, calls, exposed, window["dur"] / 1e3)
    return found


def rows(ranks: dict[int, Times], top: int) -> list[tuple[str, str, list[float]]]:
    """Return the table's lines: name, the most calls of a rank, and milliseconds on each rank."""
    everywhere: dict[str, float] = defaultdict(float)
    for times in ranks.values():
        for name, ms in times.operators.items():
            everywhere[name] += ms
    shown = sorted(everywhere, key=everywhere.__getitem__, reverse=True)[:top]
    found = []
    for name in shown:
        calls = max(t.calls[name] for t in ranks.values())
        found.append((name, str(calls), [t.operators.get(name, 0.0) for t in ranks.values()]))
    sums = [sum(t.operators.values()) for t in ranks.values()]
    others = [s - sum(row[2][i] for row in found) for i, s in enumerate(sums)]
    idle = [t.total - t.exposed - s for s, t in zip(sums, ranks.values(), strict=True)]
    return [
        *found,
        (f"{len(everywhere) - len(shown)} others", "", others),
        ("exposed communication", "", [t.exposed for t in ranks.values()]),
        ("idle", "", idle),
        ("total", "", [t.total for t in ranks.values()]),
    ]


def table(ranks: dict[int, Times], top: int) -> Table:
    """Return the table of all ranks."""
    heads = ["operator", ">calls", *(f">rank {rank}" for rank in ranks)]
    lines = ((name, calls, *(f"{ms:,.1f}" for ms in each)) for name, calls, each in rows(ranks, top))
    return make_table("milliseconds of each operator itself", heads, lines)


def main(o: Options) -> int:
    """Print the table; return 0. Raises UsageError for a file that is no trace."""
    terminal().print(table(times_of(read_trace(o.file)), o.top))
    return 0


if __name__ == "__main__":
    run_program(lambda: main(parse(Options, __doc__)))
