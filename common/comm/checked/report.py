"""The error that the checker raises, and the line of the program that it names."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

import torch

RULES = ("mix", "linear", "once", "root", "sum", "call", "meet", "equal", "step")
COMMON = Path(__file__).parents[2]
OURS = (COMMON / name for name in ("comm", "lesson", "tensors"))
MACHINERY = tuple(map(str, (Path(torch.__file__).parent, Path(os.__file__).parent, *OURS)))


class Misplaced(AssertionError):
    """A tensor is used as if it lay otherwise; the message names the rule, tensor, axis, rank and line."""

    def __init__(self, rule: str, tensor: str, axis: str, rank: int, line: str, wrong: str) -> None:
        super().__init__(rule, tensor, axis, rank, line, wrong)
        self.rule, self.tensor, self.axis, self.rank, self.line, self.wrong = self.args

    def __str__(self) -> str:
        where = f"{self.line}: rank {self.rank}, axis {self.axis}"
        return f"{where}: {self.tensor} {self.wrong} [rule: {self.rule}]"


class Absent(Misplaced, RuntimeError):
    """A rank does not come; as a RuntimeError it makes the watchdog ask every rank where it stands."""


class Report:
    """Errors of this rank, for the rules that are on."""

    def __init__(self, rank: int, rules: Collection[str]) -> None:
        self.rank, self.rules = rank, rules

    def wrong(self, rule: str, tensor: str, axis: str, text: str, kind: type[Misplaced] = Misplaced) -> None:
        """Raise Misplaced, if the rule is on."""
        if rule in self.rules:
            raise kind(rule, tensor, axis, self.rank, line_of_user(), text) from None


def line_of_user() -> str:
    """Return file:line of the innermost frame outside of torch, Python's library, and the folders OURS."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*MACHINERY, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
