"""Bugs to find: a page of right code, and the one line that is replaced by a wrong one.

Each chapter's folder has `bugs/`: pages, each a short program of one strategy, and `bugs.toml`, which lists the bugs:

    [[bug]]
    name = "mean of means"              # shown with the explanation
    page = "dp_step"
    symptom = "gradients"               # a key of SYMPTOMS, which a test measures
    right = "loss = total / count"      # a whole line of the page, without its indentation; no other line is equal
    wrong = "loss = total / len(x_BD)"  # replaces it; may have several lines, or none: the line is missing
    also = []                           # other lines of the page at which a reader may point as well
    hint = "..."
    explanation = "..."
    source = "owner/repository#1"       # a public trainer in which it happened
    exhibits = ["dp: the mean of means"]    # tests/test_museum_<file>.py: its name there
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import UsageError

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parents[2]
SYMPTOMS = {
    "hang": "the ranks wait for one another",
    "loss": "the first loss differs",
    "gradients": "the first loss is right, its gradients are not",
    "later": "the first step is right, later ones are not",
}


@dataclass(frozen=True)
class Bug:
    """A bug: the fields of bugs.toml, its chapter ("01") and its number in the chapter."""

    chapter: str
    number: int
    path: Path
    name: str
    symptom: str
    right: str
    wrong: str
    hint: str
    explanation: str
    source: str
    also: Sequence[str] = field(default=())
    exhibits: Sequence[str] = field(default=())

    @property
    def place(self) -> str:
        """Name on the command line: 01/1."""
        return f"{self.chapter}/{self.number}"

    @property
    def first(self) -> int:
        """Number of the line of the page at which the wrong text begins."""
        return self._numbers(self.right)[0]

    @property
    def page(self) -> str:
        """Text of the right page."""
        return _text(self.path)

    @property
    def text(self) -> str:
        """Text of the wrong page. Raises ValueError unless exactly one line of the page is the right line."""
        lines, (at, *others) = self.page.splitlines(), self._numbers(self.right)
        if others:
            raise ValueError(f"{self.path.name}: lines {[at, *others]} are {self.right!r}")
        indent = lines[at - 1][: -len(self.right)]
        lines[at - 1 : at] = [indent + line for line in self.wrong.splitlines()]
        return "\n".join(lines) + "\n"

    @property
    def answers(self) -> set[int]:
        """Numbers of the lines of the wrong page that count as found: of a missing line, its two neighbours."""
        more = len(self.wrong.splitlines()) - 1
        also = [n + (more if n > self.first else 0) for line in self.also for n in self._numbers(line)]
        here = range(self.first, self.first + more + 1) or (self.first - 1, self.first)
        return {*here, *also}

    def _numbers(self, wanted: str) -> list[int]:
        lines = enumerate(self.page.splitlines(), 1)
        found = [number for number, line in lines if line.strip() == wanted.strip()]
        if not found:
            raise ValueError(f"{self.path.name}: no line is {wanted!r}")
        return found


@cache
def _text(path: Path) -> str:
    return path.read_text()


def _bug(path: Path, number: int, given: dict[str, Any]) -> Bug:
    page = path.with_name(given.pop("page") + ".py")
    return Bug(path.parents[1].name[:2], number, page, **given)


def find(which: str = "") -> list[Bug]:
    """Return the bugs of all chapters, of one ("03") or one bug ("03/2"). Raises UsageError if there is none."""
    every = [
        _bug(path, number, given)
        for path in sorted(ROOT.glob("0[1-6]-*/bugs/bugs.toml"))
        for number, given in enumerate(tomllib.loads(path.read_text())["bug"], 1)
    ]
    found = [bug for bug in every if which in ("", bug.chapter, bug.place)]
    if not found:
        of_chapter = [bug.place for bug in every if bug.chapter == which[:2]]
        known = ", ".join(of_chapter or sorted({bug.chapter for bug in every}))
        raise UsageError(f"there is no bug {which!r}; choose from {known}")
    return found
