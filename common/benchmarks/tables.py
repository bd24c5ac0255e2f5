"""The report's tables, made from records; the page and the terminal show the same tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from statistics import median
from typing import Any, TypeVar

from common.benchmarks.measures import SHARES, Pair, Timing, alone, compared, speed_up
from common.lesson.measure import spread

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]  # head: cell of a row

LANGUAGES = {"pytorch": "PyTorch", "libtorch": "C++ on LibTorch", "cpp-mpi": "C++ on MPI"}
NONE = "–"


@dataclass(frozen=True)
class Row:
    """The cells of a row, and the commands that print its numbers."""

    cells: Sequence[str]
    commands: Sequence[str] = ()
    bad: bool = False


@dataclass
class Table:
    """A table. `heads` are names with their unit; a head that begins with ">" stands over numbers."""

    title: str
    heads: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    note: str = ""

    def without_empty_columns(self) -> Table:
        """Return the table without the columns in which no row has a value."""
        kept = [i for i in range(len(self.heads)) if any(row.cells[i] != NONE for row in self.rows)]
        rows = [replace(row, cells=[row.cells[i] for i in kept]) for row in self.rows]
        return replace(self, heads=[self.heads[i] for i in kept], rows=rows)

    @property
    def commands(self) -> list[str]:
        """Each command once, in the order of the rows; its index is its number in the table."""
        return list(dict.fromkeys(command for row in self.rows for command in row.commands))


def filled(
    title: str,
    columns: Columns[T],
    given: Iterable[T],
    commands: Callable[[T], Iterable[str]],
    bad: Callable[[T], bool] = lambda one: False,
    note: str = "",
) -> Table:
    """Return a table with a row for each of `given`; `commands` may name a command more than once."""
    rows = [
        Row([cell(one) for cell in columns.values()], tuple(dict.fromkeys(commands(one))), bad(one))
        for one in given
    ]
    return Table(title, list(columns), rows, note)


def text(value: float | None, form: str = "{:,.0f}", scale: float = 1.0) -> str:
    """Format a number; a dash for None."""
    return NONE if value is None else form.format(value * scale)


def digits(value: float | None, scale: float = 1.0) -> str:
    """Format a number with at least three digits and thousands separators."""
    return text(
        value, "{:,.0f}" if value is not None and abs(value * scale) >= 1000 else "{:#.3g}", scale
    ).rstrip(".")


def work_name(timing: Timing) -> str:
    """Describe the work: model, type, tokens per step."""
    tokens = f", {timing.one_rank_tokens:,.0f} tokens a step" if timing.one_rank_tokens else ""
    return f"{timing.model}, {timing.dtype}{tokens}"


def names(timings: Sequence[Timing]) -> dict[tuple[str, str, str], str]:
    """Return a short name per (implementation, language, backend), different from all other names."""
    every = list(dict.fromkeys(t.who for t in timings))
    result = {}
    for who in every:
        same = [other for other in every if other[0] == who[0]]
        languages, backends = ({other[i] for other in same} for i in (1, 2))
        more = [LANGUAGES.get(who[1], who[1])] * (len(languages) > 1) + [who[2]] * (len(backends) > 1)
        result[who] = " · ".join([who[0], *more])
    return result


WHO: Columns[Timing] = {
    "implementation": lambda t: t.implementation,
    "language": lambda t: LANGUAGES.get(t.language, t.language),
    "backend": lambda t: t.backend,
    ">ranks": lambda t: str(t.ranks),
}


def throughput(timings: Sequence[Timing], every: Sequence[Timing]) -> Table:
    """Return the speed of equal work on every rank count, and the verdict on equality to one device."""

    def runs(t: Timing) -> list[Timing | None]:
        return [t, alone(t, every), *compared(t, every)]

    def memory(t: Timing) -> float | None:
        run = alone(t, every)
        return run.peak_memory_bytes if run else None

    columns: Columns[Timing] = {
        **WHO,
        ">step (ms)": lambda t: digits(t.seconds, 1e3),
        ">spread": lambda t: text(t.spread, "{:.0%}"),
        ">tokens/s": lambda t: digits(t.tokens_per_second),
        ">GFLOP/s": lambda t: digits(t.gflops),
        ">share of peak": lambda t: text(t.peak_share, "{:.0%}"),
        ">speed-up": lambda t: text(speed_up(t, every), "{:.2f}"),
        ">memory a rank (MB)": lambda t: text(memory(t), scale=1e-6),
        "equal to one device": lambda t: equality(compared(t, every)),
    }
    return filled(
        f"Throughput: {work_name(timings[0])}",
        columns,
        timings,
        lambda t: (run.command for run in runs(t) if run),
        lambda t: not all(run.equal for run in compared(t, every)),
        two_speeds(timings),
    )


def two_speeds(timings: Sequence[Timing]) -> str:
    """Return a note if the BLASes of these implementations differ by more than 10 %, else ""."""
    peaks = {"C++ on MPI" if t.language == "cpp-mpi" else "torch": t.peak for t in timings if t.peak}
    slow, fast = min(peaks, key=peaks.__getitem__, default=""), max(peaks, key=peaks.__getitem__, default="")
    if not peaks or peaks[fast] <= 1.1 * peaks[slow]:
        return ""
    return (
        f"On one core the BLAS of {fast} reaches {digits(peaks[fast])} GFLOP/s in a {timings[0].dtype} matrix product, "
        f"that of {slow} {digits(peaks[slow])}: compare the two by their share of the peak."
    )


def equality(proofs: Sequence[Timing]) -> str:
    """Return the verdict of the runs that compared with one device, with the largest difference."""
    if not proofs:
        return "not compared"
    largest = max((t.largest_difference for t in proofs if t.largest_difference is not None), default=None)
    return f"{'yes' if all(t.equal for t in proofs) else 'no'}, {text(largest, '{:.1e}')}"


def proofs(timings: Sequence[Timing]) -> Table:
    """Return a table of the runs that compared with one device."""
    columns: Columns[Timing] = {
        **WHO,
        "model": lambda t: f"{t.model}, {t.dtype}",
        ">largest relative difference": lambda t: text(t.largest_difference, "{:.1e}"),
        "equal": lambda t: "yes" if t.equal else "no",
    }
    proved = [t for t in timings if t.equal is not None]
    return filled("Equal to one device", columns, proved, lambda t: [t.command], lambda t: not t.equal)


def communication(timings: Sequence[Timing]) -> Table:
    """Return the time per step in which ranks only wait for messages, and the bytes that a rank sends."""
    called = names(timings)

    def wrong(t: Timing) -> bool:
        return None not in (t.bytes_counted, t.bytes_formula) and t.bytes_counted != t.bytes_formula

    columns: Columns[Timing] = {
        "implementation": lambda t: called[t.who],
        ">ranks": lambda t: str(t.ranks),
        "scaling": lambda t: t.scaling,
        ">step (ms)": lambda t: digits(t.seconds, 1e3),
        ">exposed communication (ms)": lambda t: digits(t.communication_seconds, 1e3),
        ">share of the step": lambda t: text(t.communication_share, "{:.1%}"),
        "along which axis": along,
        ">bytes counted": lambda t: text(t.bytes_counted),
        ">bytes by formula": lambda t: text(t.bytes_formula) + " ≠" * wrong(t),
    }
    note = "Bytes that a rank sends in a step. A dash: not seen from outside the library."
    title, several = f"Communication: {work_name(timings[0])}", [t for t in timings if t.ranks > 1]
    return filled(title, columns, several, lambda t: [t.command], wrong, note)


def along(timing: Timing) -> str:
    """Return `tp 21%, dp 8%`: shares of a step, the mean of the ranks, the largest first.

    Shares below 0.5 % are left out.
    """
    shares = {axis: waits / timing.seconds for axis, waits in (timing.seconds_by_axis or {}).items()}
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{axis} {share:.0%}" for axis, share in largest if share >= 0.005) or NONE


def scaling(timings: Sequence[Timing]) -> Table:
    """Return speed-up and efficiency (speed-up / ranks) over rank counts, strong and weak."""
    counts = sorted({t.ranks for t in timings})
    heads = ["implementation", "scaling", *(f">{n} rank{'s' * (n > 1)}" for n in counts)]
    table = Table(f"Scaling: {work_name(timings[0])}", heads)
    table.note = "Speed-up over one rank and, in brackets, speed-up / ranks."
    called = names(timings)
    for who in called:
        for kind in ("strong", "weak"):
            runs = {t.ranks: t for t in timings if t.who == who and (t.scaling == kind or t.ranks == 1)}
            if not any(t.scaling == kind and t.ranks > 1 for t in runs.values()):
                continue
            ups = {n: speed_up(t, timings) for n, t in runs.items()}
            shown = [f"{up:.2f} ({up / n:.0%})" if (up := ups.get(n)) else NONE for n in counts]
            commands = [runs[n].command for n in sorted(runs)]
            table.rows.append(Row([called[who], kind, *shown], commands))
    return table


def bandwidths(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return time and bandwidth of the primitives over message sizes."""
    columns: Columns[Mapping[str, Any]] = {
        "primitive": lambda r: r["primitive"],
        "backend": lambda r: r["backend"],
        ">ranks": lambda r: str(r["ranks"]),
        ">bytes": lambda r: text(r["bytes"]),
        ">time (ms)": lambda r: digits(median(r["seconds"]), 1e3),
        ">spread": lambda r: text(spread(r["seconds"]), "{:.0%}"),
        ">algorithm bandwidth (GB/s)": lambda r: digits(r["algorithm_bandwidth"], 1e-9),
        ">bus bandwidth (GB/s)": lambda r: digits(r["bus_bandwidth"], 1e-9),
        "correct": lambda r: "yes" if r["correct"] else "no",
    }
    note = "Bandwidths by nccl-tests' definitions: bytes / time, and what a link between two ranks carries of it."
    in_order = sorted(records, key=lambda r: (r["backend"], r["ranks"], r["primitive"], r["bytes"]))
    return filled("Bandwidth", columns, in_order, lambda r: [r["command"]], lambda r: not r["correct"], note)


def bubbles(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return, per pipeline schedule, the share of all ranks' time without computation."""
    columns: Columns[Mapping[str, Any]] = {
        "schedule": lambda r: r["schedule"],
        "model": lambda r: r["model"],
        ">ranks": lambda r: str(r["ranks"]),
        ">micro-batches": lambda r: str(r["micro_batches"]),
        **{f">{share}": lambda r, share=share: text(r["bubble"].get(share), "{:.1%}") for share in SHARES},  # type: ignore[misc]
    }
    note = (
        "Formula and simulated: where a forward and each half of a backward take the same time. With measured times: "
        "simulated with what each computation took. Measured: messages and the executor's own work beside that."
    )
    return filled("Bubble", columns, records, lambda r: [r["command"]], note=note)


def failures(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return each failed case, with its last line of output."""
    columns: Columns[Mapping[str, Any]] = {
        "case": lambda r: r["case"],
        ">ranks": lambda r: str(r["ranks"]),
        "scaling": lambda r: r["scaling"],
        ">after (s)": lambda r: text(r.get("elapsed"), "{:.1f}"),
        "last error line": lambda r: r["error"],
    }
    return filled("Failed", columns, records, lambda r: [r["command"]], lambda r: True)


def beside(both: Sequence[Pair], title: str, alone: Sequence[str] = ()) -> Table:
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
