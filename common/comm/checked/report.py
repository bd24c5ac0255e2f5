"""The error that the checker raises."""

from __future__ import annotations

from collections.abc import Collection

from common.comm.frames import line_of_user
from common.errors import AbsentRank

RULES = ("mix", "linear", "once", "root", "sum", "call", "meet", "equal", "step")


class Misplaced(AssertionError):
    """A tensor is used as if it lay otherwise; the message names the rule, tensor, axis, rank and line."""

    def __init__(self, rule: str, tensor: str, axis: str, rank: int, line: str, wrong: str) -> None:
        super().__init__(rule, tensor, axis, rank, line, wrong)
        self.rule, self.tensor, self.axis, self.rank, self.line, self.wrong = self.args

    def __str__(self) -> str:
        where = f"{self.line}: rank {self.rank}, axis {self.axis}"
        return f"{where}: {self.tensor} {self.wrong} [rule: {self.rule}]"


class Absent(Misplaced, AbsentRank):
    """A rank does not come; the watchdog then asks every rank where it stands."""


class Report:
    """Errors of this rank, for the rules that are on."""

    def __init__(self, rank: int, rules: Collection[str]) -> None:
        self.rank, self.rules = rank, rules

    def wrong(self, rule: str, tensor: str, axis: str, text: str, kind: type[Misplaced] = Misplaced) -> None:
        """Raise Misplaced, if the rule is on."""
        if rule in self.rules:
            raise kind(rule, tensor, axis, self.rank, line_of_user(), text) from None
