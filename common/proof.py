"""The table that a lesson prints of what it proved: differences to one device, bytes counted and by formula."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch
from rich.console import Group
from rich.table import Table

from common import comm
from common.equality import KINDS, TOLERANCE, Difference
from common.ledger import show_bytes


@dataclass
class Proof:
    """Rows of one lesson: every version with every optimizer."""

    dtype: torch.dtype
    rows: list[tuple[str, str, dict[str, Difference], Fraction | None, Fraction]] = field(
        default_factory=list
    )
    elsewhere: bool = True
    """What other ranks' bytes say, after `gather`."""

    def add(
        self,
        version: str,
        optimizer: str,
        found: dict[str, Difference],
        counted: Fraction | None,
        formula: Fraction,
    ) -> None:
        """counted: bytes this rank sent by the ledger; None where messages pass the ledger by."""
        self.rows.append((version, optimizer, found, counted, formula))

    @property
    def largest(self) -> float:
        """The largest relative difference of all rows and kinds."""
        return max(d.value for _, _, found, _, _ in self.rows for d in found.values())

    @property
    def counted(self) -> bool:
        """Any bytes were."""
        return any(counted is not None for _, _, _, counted, _ in self.rows)

    @property
    def equal(self) -> bool:
        """All differences are within the tolerance of the type."""
        return self.largest <= TOLERANCE[self.dtype]

    @property
    def bytes_agree(self) -> bool:
        """Counted bytes are the formula's, exactly, wherever they were counted."""
        return self.elsewhere and all(counted in (None, formula) for _, _, _, counted, formula in self.rows)

    def gather(self, group: comm.Group) -> None:
        """Let all ranks know of one whose bytes do not agree. Collective."""
        self.elsewhere = all(comm.everyones(self.bytes_agree, group))

    @property
    def holds(self) -> bool:
        """Both."""
        return self.equal and self.bytes_agree

    def tables(self, title: str) -> Group:
        """Largest relative differences by kind, with the place of the largest; then bytes sent by this rank."""
        equality = Table(title=title, title_justify="left")
        for column in ("version", "optimizer"):
            equality.add_column(column)
        for kind in KINDS:
            equality.add_column(kind.removeprefix("gradient "), justify="right")
        equality.add_column("largest of the row is in")
        sent = Table(title="bytes a rank sent in the run, mean", title_justify="left")
        for column in ("version", "optimizer", "counted", "formula"):
            sent.add_column(column, justify="right" if column in ("counted", "formula") else "left")
        for version, optimizer, found, counted, formula in self.rows:
            worst = max(found.values(), key=lambda d: d.value)
            values = [f"{found[kind].value:.1e}" for kind in KINDS]
            equality.add_row(version, optimizer, *values, worst.where)
            shown = "not counted" if counted is None else show_bytes(counted)
            sent.add_row(version, optimizer, shown, show_bytes(formula))
        return Group(equality, sent) if self.counted else Group(equality)

    def sentence(self) -> str:
        """One line: what was proved, or what differs."""
        limit = TOLERANCE[self.dtype]
        if not self.equal:
            _, _, found, _, _ = max(self.rows, key=lambda r: max(d.value for d in r[2].values()))
            worst = max(found.values(), key=lambda d: d.value)
            return (
                f"NOT equal to one device: {worst.where} differs by {worst.value:.1e}, {limit:.0e} is allowed"
            )
        if not self.bytes_agree:
            return "equal to one device, but the bytes counted are NOT those of the formula"
        return f"proved: equal to one device within {limit:.0e}{', bytes counted = formula' if self.counted else ''}"
