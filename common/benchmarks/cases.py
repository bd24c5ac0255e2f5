"""Commands that the benchmark runs: the cases that each chapter lists in its benchmark.toml.

    title = "Data parallelism"                  # the heading in the report

    [[case]]
    name = "dp_mpi"                             # unique; --only selects by it
    launcher = "mpirun"                         # or "torchrun", or "python" (the command starts its ranks itself)
    command = "build/bin/dp_mpi --benchmark --scaling {scaling}"     # may also hold {ranks} and {variant}
    folder = ".."                               # working folder, relative to the file; default: the file's
    ranks = [1, 2, 4]                           # rank counts it can run with
    scalings = ["strong", "weak"]               # default: ["strong"]
    quick = "--model gpt2-tiny --steps 2"       # added with --quick
    variants = ["naive", "ddp"]                 # default: none; the values of {variant}, a run each
    purpose = "time"                            # default; or "equality": it compares with one device,
                                                # or "memory": it runs one implementation alone

Every command understands --json FILE, which is added here, and appends its records to that file. With one rank
weak and strong scaling are the same work, which runs once.
"""

from __future__ import annotations

import importlib
import re
import shlex
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, get_type_hints

from common.errors import UsageError
from common.launch.command_line import Count, fits

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

LAUNCHERS = {
    "mpirun": "mpirun -np {ranks} ",
    "torchrun": "torchrun --standalone --nproc_per_node={ranks} ",
    "python": "python ",
}
FORMS = {  # of the fields that are no text
    "launcher": "one of mpirun, torchrun, python",
    "ranks": "a list of counts such as [1, 2, 4]",
    "scalings": "a list of strong, weak",
    "variants": "a list of texts",
    "purpose": "one of time, equality, memory",
}


@dataclass(frozen=True)
class Case:
    """One command line of a chapter; the module's docstring explains each field."""

    title: str
    file: Path
    name: str
    launcher: Literal["mpirun", "torchrun", "python"]
    command: str
    ranks: Sequence[Count]
    folder: str = "."
    scalings: Sequence[Literal["strong", "weak"]] = ("strong",)
    variants: Sequence[str] = ("",)
    quick: str = ""
    purpose: Literal["time", "equality", "memory"] = "time"


@dataclass(frozen=True)
class Task:
    """One run of a case."""

    case: Case
    ranks: int
    scaling: str
    variant: str = ""
    quick: bool = False
    launch: str = ""

    @property
    def name(self) -> str:
        """Name that is unique among all tasks; also the name of the logs."""
        variant = re.sub(r"[^\w.]+", "-", self.variant).strip("-")
        return "-".join(filter(None, (self.case.name, variant, self.scaling, str(self.ranks))))

    @property
    def folder(self) -> Path:
        """Folder in which the command runs."""
        return (self.case.file.parent / self.case.folder).resolve()

    @property
    def command(self) -> str:
        """Command to type in that folder. `launch` replaces mpirun and torchrun."""
        starts = LAUNCHERS[self.case.launcher]
        if self.launch and self.case.launcher != "python":
            starts = f"{self.launch} {'python ' if self.case.launcher == 'torchrun' else ''}"
        words = starts + self.case.command
        words = words.format(ranks=self.ranks, scaling=self.scaling, variant=self.variant)
        return f"{words} {self.case.quick}" if self.quick and self.case.quick else words


def load(root: Path) -> list[Case]:
    """Return the cases of all chapters in order, then of common/. Raises UsageError for an invalid file."""
    files = [*sorted(root.glob("[0-9][0-9]-*/benchmark.toml")), root / "common/benchmarks/benchmark.toml"]
    cases = [case for file in files if file.exists() for case in _read(file, str(file.relative_to(root)))]
    names = [case.name for case in cases]
    for case in cases:
        if names.count(case.name) > 1:
            raise UsageError(
                f"two cases are called {case.name!r}, one of them in {case.file.relative_to(root)}"
            )
    if not cases:
        raise UsageError(f"no cases in {root}: none of its chapters has a benchmark.toml")
    return cases


def _read(file: Path, shown: str) -> list[Case]:
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:  # TOMLDecodeError is a ValueError
        raise UsageError(f"{shown} cannot be read: {error}") from None
    needed = {"title": str, "case": Sequence[Mapping[str, Any]]}
    if content.keys() != needed.keys() or not all(fits(content[key], hint) for key, hint in needed.items()):
        raise UsageError(f'{shown}: needed are title = "..." and [[case]] tables, found {sorted(content)}')
    return [
        _case(table, content["title"], file, f"{shown}, case {i}")
        for i, table in enumerate(content["case"], 1)
    ]


def _case(table: dict[str, Any], title: str, file: Path, shown: str) -> Case:
    """Return a case from its table, each value checked. Raises UsageError."""
    types = get_type_hints(Case, include_extras=True)
    del types["title"], types["file"]
    shown += f" ({table['name']})" if "name" in table else ""
    if unknown := table.keys() - types.keys():
        raise UsageError(f"{shown}: unknown {', '.join(sorted(unknown))}; a case has {', '.join(types)}")
    if missing := [key for key in ("name", "launcher", "command", "ranks") if key not in table]:
        raise UsageError(f"{shown}: {', '.join(missing)} missing")
    for key, value in table.items():
        if not fits(value, types[key]):
            raise UsageError(f"{shown}: {key} = {value!r} is not {FORMS.get(key, 'a text')}")
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(table["command"]) if name is not None}
        shlex.split(table["command"])
    except ValueError as error:
        raise UsageError(f"{shown}: command cannot be read: {error}") from None
    if unknown := names - {"ranks", "scaling", "variant"}:
        raise UsageError(
            f"{shown}: command holds {{{sorted(unknown)[0]}}}; it may hold {{ranks}}, {{scaling}}, {{variant}}"
        )
    return Case(title, file, **table)


def select(
    cases: Sequence[Case],
    only: Sequence[str] = (),
    ranks: Sequence[int] = (),
    quick: bool = False,
    cores: int = 1,
    launch: str = "",
) -> list[Task]:
    """Return the tasks to run, in order.

    `only` are patterns of case or task names; `ranks` are counts to run. Without `ranks`, timed cases run
    with at most as many ranks as there are cores (more ranks would share cores), but at least with the
    smallest count of the case. `quick` takes one run of each case, with the most of these ranks, and no case
    that only measures memory. `launch` is the command that starts {ranks} ranks, such as "srun
    --ntasks={ranks}", in place of mpirun or torchrun. Raises UsageError if no task is left.
    """
    if launch and "{ranks}" not in launch:
        raise UsageError(
            f"--launch {launch} does not say how many; give {{ranks}}, as in mpirun -np {{ranks}}"
        )
    tasks = [replace(task, launch=launch) for case in cases for task in _tasks(case, ranks, quick, cores)]
    if not tasks:
        known = sorted({n for case in cases for n in case.ranks})
        raise UsageError(f"no case runs with {list(ranks)} ranks; they run with {known}")
    chosen = _matching(tasks, only)
    if not chosen and (counts := _counts(cases, only, quick)):
        raise UsageError(
            f"--only {' '.join(only)}: its runs have {counts} ranks; give one of these as --ranks"
        )
    if not chosen and quick and _counts(cases, only, False):
        raise UsageError(f"--only {' '.join(only)} matches no run of --quick, which makes one of each case")
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise UsageError(f"--only {' '.join(only)} matches no case; the cases are {names}")
    return chosen


def _matching(tasks: Sequence[Task], only: Sequence[str]) -> list[Task]:
    return [t for t in tasks if not only or any(fnmatch(n, p) for n in (t.case.name, t.name) for p in only)]


def _counts(cases: Sequence[Case], only: Sequence[str], quick: bool) -> list[int]:
    """Return all rank counts with which a case or task that `only` matches could run."""
    each = [task for case in cases for n in case.ranks for task in _tasks(case, [n], quick, n)]
    return sorted({task.ranks for task in _matching(each, only)})


def _tasks(case: Case, ranks: Sequence[int], quick: bool, cores: int) -> list[Task]:
    fit = [n for n in case.ranks if n <= cores or case.purpose == "equality"] or [min(case.ranks)]
    counts = [n for n in case.ranks if n in ranks] if ranks else fit
    every = [
        Task(case, n, scaling, variant, quick)
        for scaling in case.scalings
        for n in counts
        if n > 1 or scaling == case.scalings[0]
        for variant in case.variants
    ]
    if not quick:
        return every
    if case.purpose == "memory":
        return []
    return [task for task in every if task.ranks == max(counts)][:1]
