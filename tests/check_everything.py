"""Every lesson of the course, and meshes of the proof table, with --check: nothing may be misplaced.

    python tests/check_everything.py                                  all: some minutes on two cores
    python tests/check_everything.py --only tp_summa --meshes 0       lessons whose names begin so

Sizes are small. A lesson trains with SGD and takes each time once: only the words of the checker count here.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from unittest.mock import patch

from common.comm.checked.asked import asking
from common.comm.mesh import AXES
from common.errors import RankError, UsageError
from common.launch.command_line import Checked, Within, parse
from common.launch.program import run_program
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson import equality, measure, runner

from hybrid_rows import RowOptions, table
from hybrid_training import make_job, train

ROOT = Path(__file__).parents[1]
LESSONS = {
    file.stem: file for file in sorted(ROOT.glob("0*/pytorch/*.py")) if "    run(main, " in file.read_text()
}
TWO = ("by_hand", "manual")  # ends of lessons for two ranks
NOTHING = {"pp_by_hand"}  # takes --check, and then says that there is nothing to check
T = TypeVar("T")
SMALL = {"steps": 2, "batch": 8, "sequence": 16, "tokens": 256, "width": 32, "rows": 512, "curve_steps": 16}
OWN: dict[str, dict[str, Any]] = {  # options that a lesson needs beside SMALL
    "dp_accumulation": {"steps": 3},
    "dp_loss_scaling": {"steps": 3, "overflow": 1},
    "dp_local_sgd": {"every": 2},
    "dp_matrix_multiply": {"shape": (29, 31, 37)},
    "tp_summa": {"shape": (29, 31, 37)},
    "sp_library": {"shape": (64, 2, 8)},
}
LAYOUTS: dict[str, dict[int, list[dict[str, Any]]]] = {  # of chapter 06, by the number of ranks
    "hybrid_3d": {2: [{"tp": 2}], 4: [{"pp": 2, "tp": 2}, {"dp": 2, "pp": 2, "zero": 1}]},
    "hybrid_4d": {2: [{"sp": 2}], 4: [{"sp": 2, "tp": 2, "sequence_parallel": True}, {"sp": 2, "zero": 3}]},
    "hybrid_5d": {2: [{"ep": 2}], 4: [{"ep": 2, "tp": 2}, {"pp": 2, "ep": 2, "schedule": "zb-h1"}]},
}


@dataclass(frozen=True)
class Run:
    """A start of a lesson: its module, its options and the number of ranks."""

    lesson: str
    given: dict[str, Any]
    ranks: int


def instead(name: str, work: Callable[..., T]) -> T:
    """Start a lesson; return what `work(main, options_type, versions)` returns in place of `run`."""
    found: list[T] = []

    def run(main: Any, options_type: Any, versions: Iterable[str] = ()) -> None:
        found.append(work(main, options_type, tuple(versions)))

    with patch.object(runner, "run", run):
        runpy.run_path(str(LESSONS[name]), run_name="__main__")
    return found[0]


def small(name: str, main: Any, options_type: Any, versions: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the options of a small run; None if the lesson does not take --check."""
    try:
        parse(options_type, args=["--check"])
    except UsageError:
        return None
    known = {field.name for field in fields(options_type)}
    given: dict[str, Any] = {option: value for option, value in SMALL.items() if option in known}
    return given | OWN.get(name, {}) | ({"versions": versions} if versions else {})


def runs(only: str = "") -> Iterator[Run]:
    """Yield the runs of the lessons whose names begin with `only`."""
    for name in LESSONS:
        given = None
        if name.startswith(only) and name not in NOTHING:
            given = instead(name, partial(small, name))
        for n in () if given is None else (2,) if name.endswith(TWO) else (2, 4):
            yield from (Run(name, given | layout, n) for layout in LAYOUTS.get(name, {}).get(n, [{}]))


class OnlySGD(dict[str, Any]):
    """Optimizers by name; one who goes through them finds SGD alone."""

    def __missing__(self, name: str) -> Any:
        return ALL[name]


ALL = dict(equality.OPTIMIZERS)


def hasten(in_turn: Any = measure.in_turn) -> None:
    """Let the harness in this process train with SGD alone, once on one device, and take each time once."""
    quick = {
        "in_turn": lambda cases, rounds, group, **how: in_turn(cases, 1, group, **how),
        "with_units": lambda run: run(equality.unmoved),
        "OPTIMIZERS": OnlySGD(sgd=ALL["sgd"]),
    }
    for module in list(sys.modules.values()):
        for name in quick.keys() & vars(module).keys():
            setattr(module, name, quick[name])


def check_lesson(rt: Runtime, run: Run) -> str:
    """Run a lesson under --check; return the last line that it prints."""

    def work(main: Any, options_type: Any, versions: tuple[str, ...]) -> bool:
        return runner._checked(main, rt, options_type(**run.given, check=True))

    hasten()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert instead(run.lesson, work), run
    return printed.getvalue().splitlines()[-1] if rt.rank == 0 else ""


def check_meshes(rt: Runtime, rows: list[RowOptions]) -> list[int]:
    """Train two steps on the mesh of every row under --check; return the messages of the checker on rank 0."""
    sent = []
    with asking(60.0) as blocks:
        for o in rows:
            if rt.rank == 0:
                print(f"{rt.world_size} ranks, {described(o)}", flush=True)
            mesh = o.mesh(rt)
            job = make_job(rt, o, mesh, equality.OPTIMIZERS["sgd"], o.steps)
            equality.watch(train(job), job, mesh)
            mesh.close()
            sent.append(blocks[-1].meeting.messages)
    return sent


def described(o: RowOptions) -> str:
    """Return the mesh, the model and the layout of a row."""
    words = [f"{axis}={getattr(o, axis)}" for axis in AXES if getattr(o, axis) > 1]
    layout = ("schedule", "attention", "sequence_parallel", "zero", "checkpointing", "clip")
    return " ".join([o.model, *words, *(f"{name}={getattr(o, name)}" for name in layout)])


@dataclass
class Options(Checked):
    """Options: a part of it all."""

    only: str = ""
    """Beginning of the names of the lessons to run."""
    meshes: Annotated[int, Within(0, 120)] = 30
    """Number of meshes, evenly spread over the proof table."""


def main(o: Options) -> int:
    """Run all; return 1 if the checker or a proof raised an alarm, else 0."""
    alarms, every = 0, list(runs(o.only))
    rows = [(n, row) for n, of_n in table().items() for row in of_n]
    chosen = [rows[i * len(rows) // o.meshes] for i in range(o.meshes)]
    works = [(partial(check_lesson, run=run), run.ranks, f"{run.lesson} {run.given}") for run in every]
    for n in sorted({n for n, _ in chosen}):
        of_n = [row for ranks, row in chosen if ranks == n]
        works.append((partial(check_meshes, rows=of_n), n, f"{len(of_n)} meshes"))
    for work, ranks, name in works:
        began = time.perf_counter()
        try:
            found = spawn(work, ranks, timeout=120, limit=None)[0]
        except RankError as error:
            alarms += 1
            found = f"ALARM: {str(error).splitlines()[-1]}"
        print(f"{ranks} ranks, {time.perf_counter() - began:.0f} s, {name}: {found}", flush=True)
    lessons = len({run.lesson for run in every})
    print(f"{lessons} lessons in {len(every)} runs, {len(chosen)} meshes: {alarms} alarms")
    return 1 if alarms else 0


if __name__ == "__main__":
    run_program(lambda: main(parse(Options, __doc__)))
