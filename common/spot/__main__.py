"""Bugs to find: a page of code with one wrong line, its symptoms, and a reader who points at the line.

    python -m common.spot                    a bug drawn at random
    python -m common.spot 03/2               one bug; 03 draws from a chapter
    python -m common.spot --list             all of them, by chapter and symptom
    python -m common.spot 03/2 --answer 41   the line without a prompt

Exit code 0: found; 1: not found; 2: bad input.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from common.errors import UsageError
from common.launch.command_line import Checked, Count, Seed, check_folder, parse
from common.launch.program import run_program
from common.launch.terminal import terminal
from common.spot.bugs import Bug, find
from common.spot.run import examine
from common.spot.show import plot, show_list, show_page, show_solution, show_symptoms

PICTURES = (".png", ".svg", ".pdf")


@dataclass
class SpotOptions(Checked):
    """Options of the bugs to find."""

    which: Annotated[str, tyro.conf.Positional] = ""
    """A bug (03/2), or a chapter (03) to draw from; default: draw from all."""
    answer: Count | None = None
    """Number of the wrong line; default: ask on a terminal."""
    list: bool = False
    """List the bugs by chapter and symptom."""
    plot: Path | None = None
    """Draw the loss curves into this file (.png, .svg, .pdf)."""
    seed: Seed | None = None
    """Seed of the draw; default: another bug each time."""


def told(out: Console, bug: Bug, line: int, hinted: bool) -> bool:
    """Say whether the line is the wrong one, with the hint after a first mistake. Raises UsageError."""
    last = len(bug.text.splitlines())
    if not 1 <= line <= last:
        raise UsageError(f"line {line}: the page has lines 1 to {last}")
    if line in bug.answers:
        out.print(f"Line {line}: found.", style="green")
        show_solution(out, bug)
        return True
    out.print(f"Line {line} is right.", style="red")
    if not hinted:
        out.print(f"Hint: {escape(bug.hint)}")
    return False


def ask(out: Console, bug: Bug) -> bool:
    """Ask for the line until it is found or the reader gives up; return True if it is found."""
    hinted = False
    while True:
        try:
            given = input("Which line is wrong? (Enter gives up) ").strip()
        except EOFError:
            given = ""
        if not given:
            show_solution(out, bug)
            return False
        try:
            if told(out, bug, int(given), hinted):
                return True
            hinted = True
        except (ValueError, UsageError):
            out.print(f"{escape(given)}: give the number of a line of the page")


def main(o: SpotOptions) -> int:
    """Choose a bug, show its symptoms and its page, take the answer; return the exit code."""
    out, bugs = terminal(), find(o.which)
    if o.list:
        show_list(out, bugs)
        return 0
    bug = random.Random(o.seed).choice(bugs)
    if o.answer is not None:
        return 0 if told(out, bug, o.answer, hinted=False) else 1
    if o.plot:
        if o.plot.suffix.lower() not in PICTURES:
            raise UsageError(f"--plot {o.plot}: give a file whose name ends in {', '.join(PICTURES)}")
        check_folder("plot", o.plot, o.plot.absolute().parent)
    found = examine(bug)
    show_symptoms(out, bug, found)
    show_page(out, bug)
    if o.plot and not isinstance(found, str):
        plot(o.plot, bug, found)
    if out.is_terminal and sys.stdin.isatty():
        return 0 if ask(out, bug) else 1
    out.print(f"Answer with the number of the wrong line: python -m common.spot {bug.place} --answer LINE")
    return 1


if __name__ == "__main__":
    run_program(lambda: main(parse(SpotOptions, __doc__)))
