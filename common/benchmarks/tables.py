"""The report's tables, made from records; the page and the terminal show the same tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from common.benchmarks.measures import SHARES, Timing, alone, compared, speed_up

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
        more = [
            what
            for what, there in (
                (LANGUAGES.get(who[1], who[1]), {s[1] for s in same}),
                (who[2], {s[2] for s in same}),
            )
            if len(there) > 1
        ]
        result[who] = " · ".join([who[0], *more])
    return result


def throughput(timings: Sequence[Timing], every: Sequence[Timing]) -> Table:
    """Return the speed of equal work on every rank count, and the verdict on equality to one device."""
    table = Table(
        f"Throughput: {work_name(timings[0])}",
        (
            "implementation",
            "language",
            "backend",
            ">ranks",
            ">step (ms)",
            ">spread",
            ">tokens/s",
            ">GFLOP/s",
            ">share of peak",
            ">speed-up",
            ">memory a rank (MB)",
            "equal to one device",
        ),
    )
    table.note = two_speeds(timings)
    for t in timings:
        memory, proofs = alone(t, every), compared(t, every)
        cells = [
            t.implementation,
            LANGUAGES.get(t.language, t.language),
            t.backend,
            str(t.ranks),
            digits(t.seconds, 1e3),
            text(t.spread, "{:.0%}"),
            digits(t.tokens_per_second),
            digits(t.gflops),
            text(t.peak_share, "{:.0%}"),
            text(speed_up(t, every), "{:.2f}"),
            text(memory.peak_memory_bytes if memory else None, scale=1e-6),
            equality(proofs),
        ]
        commands = dict.fromkeys(run.command for run in (t, memory, *proofs) if run)
        table.rows.append(Row(cells, tuple(commands), bad=not all(run.equal for run in proofs)))
    return table


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
    table = Table(
        "Equal to one device",
        ("implementation", "language", "backend", ">ranks", "model", ">largest relative difference", "equal"),
    )
    for t in timings:
        if t.equal is not None:
            language, model = LANGUAGES.get(t.language, t.language), f"{t.model}, {t.dtype}"
            difference, verdict = text(t.largest_difference, "{:.1e}"), "yes" if t.equal else "no"
            cells = [t.implementation, language, t.backend, str(t.ranks), model, difference, verdict]
            table.rows.append(Row(cells, (t.command,), bad=not t.equal))
    return table


def communication(timings: Sequence[Timing]) -> Table:
    """Return the time per step in which ranks only wait for messages, and the bytes that a rank sends."""
    table = Table(
        f"Communication: {work_name(timings[0])}",
        (
            "implementation",
            ">ranks",
            "scaling",
            ">step (ms)",
            ">exposed communication (ms)",
            ">share of the step",
            "along which axis",
            ">bytes counted",
            ">bytes by formula",
        ),
    )
    called = names(timings)
    for t in (t for t in timings if t.ranks > 1):
        wrong = None not in (t.bytes_counted, t.bytes_formula) and t.bytes_counted != t.bytes_formula
        cells = [
            called[t.who],
            str(t.ranks),
            t.scaling,
            digits(t.seconds, 1e3),
            digits(t.communication_seconds, 1e3),
            text(t.communication_share, "{:.1%}"),
            along(t),
            text(t.bytes_counted),
            text(t.bytes_formula) + (" ≠" if wrong else ""),
        ]
        table.rows.append(Row(cells, (t.command,), bad=wrong))
    table.note = "Bytes that a rank sends in a step. A dash: not seen from outside the library."
    return table


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
    table = Table(
        "Bandwidth",
        (
            "primitive",
            "backend",
            ">ranks",
            ">bytes",
            ">time (ms)",
            ">spread",
            ">algorithm bandwidth (GB/s)",
            ">bus bandwidth (GB/s)",
            "correct",
        ),
    )
    table.note = "Bandwidths by nccl-tests' definitions: bytes / time, and what a link between two ranks carries of it."
    for r in sorted(records, key=lambda r: (r["backend"], r["ranks"], r["primitive"], r["bytes"])):
        middle = median(r["seconds"])
        cells = [
            r["primitive"],
            r["backend"],
            str(r["ranks"]),
            text(r["bytes"]),
            digits(middle, 1e3),
            text((max(r["seconds"]) - min(r["seconds"])) / middle, "{:.0%}"),
            digits(r["algorithm_bandwidth"], 1e-9),
            digits(r["bus_bandwidth"], 1e-9),
            "yes" if r["correct"] else "no",
        ]
        table.rows.append(Row(cells, (r["command"],), bad=not r["correct"]))
    return table


def bubbles(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return, per pipeline schedule, the share of all ranks' time without computation."""
    heads = ("schedule", "model", ">ranks", ">micro-batches", *(f">{share}" for share in SHARES))
    table = Table("Bubble", heads)
    table.note = (
        "Formula and simulated: where a forward and each half of a backward take the same time. With measured times: "
        "simulated with what each computation took. Measured: messages and the executor's own work beside that."
    )
    for r in records:
        numbers = [text(r["bubble"][share], "{:.1%}") for share in SHARES]
        cells = [r["schedule"], r["model"], str(r["ranks"]), str(r["micro_batches"]), *numbers]
        table.rows.append(Row(cells, (r["command"],)))
    return table


def failures(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return each failed case, with its last line of output."""
    table = Table("Failed", ("case", ">ranks", "scaling", ">after (s)", "last error line"))
    for r in records:
        cells = [r["case"], str(r["ranks"]), r["scaling"], text(r.get("elapsed"), "{:.1f}"), r["error"]]
        table.rows.append(Row(cells, (r["command"],), bad=True))
    return table
