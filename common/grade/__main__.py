"""Grade the course's exercises: what passes, what fails first, and the number that was wrong.

    python -m common.grade                all exercises
    python -m common.grade 03             those of a chapter
    python -m common.grade 03/2           one
    python -m common.grade --mine model.py --mesh "tp=2 dp=2"      a model file of your own against one device

Exit code 0: all pass; 1: one does not; 2: bad input.
"""

from __future__ import annotations

import secrets
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from common.grade.attempt import attempt
from common.grade.exercises import Exercise, Outcome, find
from common.grade.mine import grade_mine, parse_mesh
from common.launch.command_line import Checked, Seed, parse
from common.launch.program import run_program
from common.launch.terminal import terminal


@dataclass
class GradeOptions(Checked):
    """Options of the grader."""

    which: Annotated[str, tyro.conf.Positional] = ""
    """A chapter (03) or an exercise (03/2); default: all."""
    folder: Literal["exercises", "solutions"] = "exercises"
    """Grade the files of this folder of each chapter."""
    mine: Path | None = None
    """Model file of your own, to compare with one device in place of the exercises. It has the functions make_model(),
    batch(step), parallelize(model, mesh) and step(model, batch, mesh); examples/model_to_grade.py is one to copy."""
    mesh: str = "dp=2"
    """Mesh for --mine: ranks along pp, dp, ep, sp and tp."""
    seed: Seed | None = None
    """Seed of the inputs; default: another one each time, which is printed."""


def show(out: Console, exercise: Exercise, outcome: Outcome) -> None:
    """Print an exercise: a line if it passes or is still to be written, else its targets and what was wrong."""
    verdict = (
        "[green]passed[/]  " if outcome.passed else "to write" if outcome.to_write else "[red]FAILED[/]  "
    )
    count = f"{outcome.met} of {len(outcome.targets)} targets met"
    out.print(f"{exercise.name:5} {verdict}  {count}  {escape(exercise.title)}")
    if outcome.passed:
        return
    if outcome.to_write:
        out.print(f"        first: {escape(outcome.wrong)}")
        return
    for name in outcome.targets[: outcome.met]:
        out.print(f"        met     {escape(name)}")
    out.print(f"        [red]missed[/]  {escape(outcome.targets[outcome.met])}")
    out.print(textwrap.indent(textwrap.fill(escape(outcome.wrong), 96), " " * 16))
    if more := len(outcome.targets) - outcome.met - 1:
        out.print(f"        {more} more not tried")


def show_mine(out: Console, path: Path, mesh: str) -> int:
    """Print what differs from one device with each optimizer; return the exit code."""
    found = grade_mine(path, mesh)
    for optimizer, wrong in found.items():
        verdict = (
            f"[red]differs[/]: {escape(wrong)}" if wrong else "[green]equal[/] to one device within 1e-12"
        )
        out.print(f"{path.name}, {mesh}, {optimizer}: {verdict}")
    return 1 if any(found.values()) else 0


def main(o: GradeOptions) -> int:
    """Grade and print; return the exit code."""
    out = terminal()
    parse_mesh(o.mesh)
    if o.mine:
        return show_mine(out, o.mine, o.mesh)
    exercises = find(o.which, o.folder)
    seed = secrets.randbelow(10**6) if o.seed is None else o.seed
    passed = 0
    for exercise in exercises:
        outcome = attempt(exercise, seed)
        show(out, exercise, outcome)
        passed += outcome.passed
    out.print(f"{passed} of {len(exercises)} passed (--seed {seed} repeats these inputs)")
    return 0 if passed == len(exercises) else 1


if __name__ == "__main__":
    run_program(lambda: main(parse(GradeOptions, __doc__)))
