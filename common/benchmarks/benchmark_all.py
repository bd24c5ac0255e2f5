"""Run every chapter's implementations, languages and rank counts in turn, and write a report of them.

    python common/benchmarks/benchmark_all.py                      make benchmark does the same
    python common/benchmarks/benchmark_all.py --only 'dp_mpi*' --ranks 1 2 4
    python common/benchmarks/benchmark_all.py --resume             goes on where an earlier run ended
    scripts/benchmark_cluster.sh hosts                             the same over several hosts, or under Slurm

Writes into --output: records.jsonl (one record per line: case, machine, date, command, times), plots/,
logs/ and report.html. Chapters list what to run in their benchmark.toml: see common/benchmarks/cases.py.
Exit code 0: all ran; 1: a case failed, the report says which, or --output is full; 2: bad input.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from common.benchmarks import peaks, plots, report, runner, tables
from common.benchmarks.cases import Task, load, select
from common.benchmarks.measures import timings
from common.errors import UsageError
from common.launch import forked, spawn
from common.launch.command_line import Checked, Count, Ranks, Within, parse
from common.launch.program import run_program, show_on_stderr
from common.launch.terminal import make_table, terminal
from common.utils.environment import describe

# modules that lessons import, and those that torch imports for them
PRELOAD = [*spawn.PRELOAD, "torch.fx.experimental.symbolic_shapes", "common.lesson.comparison"]
ROOT = Path(__file__).resolve().parents[2]
Record = dict[str, Any]
IMPORTANT = (
    "implementation",
    "ranks",
    "step (ms)",
    "tokens/s",
    "share of peak",
    "speed-up",
    "equal to one device",
)


@dataclass
class Options(Checked):
    """Options: the cases to run, and the output folder."""

    output: Path = Path("results")
    """Folder for records, plots, logs and report.html."""
    only: tuple[str, ...] = ()
    """Patterns of the cases to run, such as dp_basic or '*-weak-2'."""
    ranks: tuple[Ranks, ...] = ()
    """Rank counts; left out: those that the cases list, up to the cores."""
    cores: Count | None = None
    """Cores of all hosts together; left out: those of this machine."""
    launch: str = ""
    """Command in place of mpirun and torchrun, such as 'mpirun --hostfile hosts -np {ranks}'."""
    quick: bool = False
    """One short run of each case, with a small model, as a check that everything works."""
    fresh: bool = False
    """Start every script in a new Python; default: in a fork of one that has imported torch."""
    resume: bool = False
    """Keep the stored records, and run the cases that are missing or failed."""
    timeout: Annotated[float, Within(1e-3, 1e6)] = 180.0
    """Seconds that a case may take."""
    picture: Path | None = None
    """File for the figure of the README."""


def main(options: Options, root: Path = ROOT) -> int:
    """Run the cases and write the report; return the exit code. Raises UsageError."""
    os.environ["PATH"] = runner.environment()["PATH"]
    cores = options.cores or plots.cores()
    tasks = select(load(root), options.only, options.ranks, options.quick, cores, options.launch)
    file = options.output / "records.jsonl"
    earlier = report.read(file) if options.resume else []
    failed = {r["command"] for r in earlier if "error" in r}
    records = [r for r in earlier if r["command"] not in failed]
    done = {r["command"] for r in records}
    tasks = [task for task in tasks if command_line(task, root) not in done]
    try:
        (options.output / "logs").mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")  # a full disk leaves the earlier records as they are
        part.write_text("".join(json.dumps(r) + "\n" for r in records))
        part.replace(file)
    except OSError as error:
        raise UsageError(f"--output {options.output} cannot be written: {error.strerror}") from None
    console = terminal()
    full: OSError | None = None
    anew = options.fresh or options.launch or not forked.possible()
    with (
        nullcontext() if anew else forked.interpreter(PRELOAD, runner.environment()) as python,
        progress(console, len(tasks)) as show_progress,
    ):
        peak = peaks.measured(runner.environment(), options.timeout)
        where = {"machine": machine(), "cores": cores, "commit": commit(root), "peaks": peak}
        for task in tasks:
            show_progress(task.name, None)
            try:
                outcome = runner.run(task, options.output / "logs", options.timeout, python)
                found = outcome.records + ([{"error": outcome.error}] if outcome.error else [])
                made = [_record(task, outcome, one, where, root) for one in found]
                records += made
                with file.open("a") as lines:
                    lines.writelines(json.dumps(r) + "\n" for r in made)
            except OSError as error:
                full = error
                break
            show_progress(task.name, outcome)
    try:
        code = show(records, options.output, options.picture, console)
    except OSError as error:
        full, code = full or error, 1
    if full:
        stored = f"{file} has what was stored, --resume goes on from there"
        show_on_stderr(
            f"error: {full.filename or options.output} cannot be written: {full.strerror}; {stored}"
        )
    return 1 if full else code


def command_line(task: Task, root: Path) -> str:
    """Return the command to type in the repository's root that shows this task's numbers."""
    folder = task.folder
    shown = folder.relative_to(root) if folder.is_relative_to(root) else folder
    threads = f"OMP_NUM_THREADS=1 {task.command}"
    return threads if shown == Path() else f"cd {shown} && {threads}"


def _record(task: Task, outcome: runner.Outcome, one: Record, where: Record, root: Path) -> Record:
    """Return a record as it is stored: the program's fields and those that the benchmark adds."""
    return {
        "chapter": task.case.title,
        "case": task.name,
        "ranks": task.ranks,
        "scaling": task.scaling,
        **one,
        "purpose": task.case.purpose,
        "command": command_line(task, root),
        "elapsed": round(outcome.seconds, 3),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        **where,
    }


def machine() -> dict[str, str]:
    """Return processor, cores and versions by name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"processor": (names or [platform.processor() or platform.machine()])[0], **describe()}


def commit(root: Path) -> str:
    """Return the commit, and whether files differ from it; "unknown" in a copy without git."""

    def git(*words: str) -> str:
        command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (", with changes" if git("status", "--short") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str, runner.Outcome | None], None]]:
    """Yield show(name, outcome): on a terminal a bar with the remaining time, elsewhere a line per case."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    quiet = not console.is_terminal
    with Progress(*columns, console=console, disable=quiet, speed_estimate_period=math.inf) as bar:
        line = bar.add_task("", total=total)

        def show(name: str, outcome: runner.Outcome | None) -> None:
            if outcome is None:
                bar.update(line, description=name)
                return
            bar.advance(line)
            number = f"[{bar.tasks[0].completed:.0f}/{total}]"
            result = (
                f"[red]failed: {escape(outcome.error)}[/]" if outcome.error else f"{outcome.seconds:.1f} s"
            )
            if outcome.error or quiet:
                console.print(f"{escape(number)} {name}  {result}", soft_wrap=True)

        yield show


def show(records: Sequence[Record], output: Path, picture: Path | None, console: Console) -> int:
    """Show the records in the terminal and write the report to `output`; return 1 if a case failed."""
    timed = [t for t in timings(records) if t.purpose == "time"]
    for work in dict.fromkeys(t.work for t in timed):
        same = report.in_order([t for t in timed if t.work == work and t.scaling == "strong"])
        if same:
            table = tables.throughput(same, timings(records))
            if table.note:
                console.print(table.note, markup=False)
            show_table(table, console)
    for verdict in report.verdicts(records):
        console.print(("" if verdict.good else "[red]") + escape(verdict.sentence))
    path = report.write(records, output)
    if picture and not timed:
        raise UsageError(f"--picture {picture}: no case that was run measures steps")
    if picture:
        plots.picture(timed, picture)
    console.print(f"report: {path}", soft_wrap=True)
    return 1 if any("error" in r for r in records) else 0


def show_table(table: tables.Table, console: Console, columns: Sequence[str] = IMPORTANT) -> None:
    """Print a table of the report with its most important columns."""
    table = table.without_empty_columns()
    chosen = [place for place, head in enumerate(table.heads) if head.lstrip(">") in columns]
    shown = make_table(escape(table.title), [table.heads[place] for place in chosen])
    for row in table.rows:
        shown.add_row(*(escape(row.cells[place]) for place in chosen), style="red" if row.bad else None)
    console.print(shown)


if __name__ == "__main__":
    try:
        run_program(lambda: main(parse(Options, __doc__)))
    except KeyboardInterrupt:
        print("stopped; --resume goes on from here", file=sys.stderr)
        sys.exit(130)
