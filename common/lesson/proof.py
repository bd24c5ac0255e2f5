"""Tables of a lesson's proof: differences from one device, bytes counted and by formula."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from rich.console import Group as Stack

from common import comm
from common.comm.ledger import show_bytes
from common.comm.mesh import Mesh
from common.launch.terminal import make_table
from common.lesson.equality import (
    KINDS,
    TOLERANCE,
    ULPS,
    Difference,
    Followed,
    compare,
    in_ulps,
    worst,
    worst_of_world,
)
from common.lesson.measure import BenchmarkRecord


@dataclass(frozen=True)
class Row:
    """A version with an optimizer. counted: bytes this rank sent; None if the ledger does not see them."""

    version: str
    optimizer: str
    found: dict[str, Difference]
    ulps: Difference | None
    counted: Fraction | None
    formula: Fraction
    limit: float

    @property
    def largest(self) -> Difference:
        """Largest relative difference of all kinds."""
        return worst(self.found.values())

    @property
    def equal(self) -> bool:
        """True if all differences are within the tolerance, and below ULPS in their own units."""
        return self.largest.value <= self.limit and (self.ulps is None or self.ulps.value < ULPS)

    def cells(self) -> list[str]:
        """Return the row's cells of the table."""
        values = [f"{self.found[kind].value:.1e}" for kind in KINDS]
        ulps = "-" if self.ulps is None else f"{self.ulps.value:.1f}"
        return [self.version, self.optimizer, *values, ulps, self.largest.where]


@dataclass
class Proof:
    """Proof of one lesson on a mesh: a row for every version with every optimizer."""

    mesh: Mesh
    dtype: torch.dtype
    rows: list[Row] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    """Losses of one device, by optimizer, of the first row of each."""
    elsewhere: bool = True
    """After `gather`: True if the bytes agree on all ranks."""
    agree: bool = True
    """True unless versions that were compared with one another differ."""

    def add(
        self,
        version: str,
        optimizer: str,
        reference: Followed,
        followed: Followed | None,
        counted: Fraction | None,
        formula: Fraction,
    ) -> None:
        """Compare a version with one device. Collective; followed: None if another rank has the results."""
        found = compare(reference, followed or reference)
        if reference.units is not None:
            found["ulps"] = in_ulps(reference, followed or reference)
        found = worst_of_world(found, self.mesh)
        ulps = found.pop("ulps", None)
        self.losses.setdefault(optimizer, reference.losses)
        limit = TOLERANCE[self.dtype]
        self.rows.append(Row(version, optimizer, found, ulps, counted, formula, limit))

    @property
    def counted(self) -> bool:
        """True if the bytes of any row were counted."""
        return any(row.counted is not None for row in self.rows)

    @property
    def equal(self) -> bool:
        """True if all rows are equal."""
        return all(row.equal for row in self.rows)

    @property
    def bytes_agree(self) -> bool:
        """True if counted bytes equal the formula's exactly, in every row that counts them."""
        return self.elsewhere and all(row.counted in (None, row.formula) for row in self.rows)

    def gather(self, group: comm.Group) -> None:
        """Tell all ranks if the bytes of any rank do not agree; then let rows have the ranks' mean. Collective."""
        ranks = comm.everyones([(row.counted, row.formula) for row in self.rows], group)
        self.elsewhere = all(counted in (None, formula) for rows in ranks for counted, formula in rows)
        for i, row in enumerate(self.rows):
            counted, formula = zip(*(rows[i] for rows in ranks), strict=True)
            mean = None if None in counted else sum(counted, Fraction(0)) / len(ranks)
            self.rows[i] = replace(row, counted=mean, formula=sum(formula, Fraction(0)) / len(ranks))

    @property
    def holds(self) -> bool:
        """True if all rows are equal, bytes are those of the formula and versions agree."""
        return self.equal and self.bytes_agree and self.agree

    def recorded(
        self, records: Sequence[BenchmarkRecord], versions: Iterable[str] | None = None
    ) -> list[BenchmarkRecord]:
        """Return the records, each with its version's verdict and largest difference by optimizer, if proved.

        versions: the version of each record; default: its implementation.
        """
        versions = [record.implementation for record in records] if versions is None else versions
        done = []
        for version, record in zip(versions, records, strict=True):
            rows = [row for row in self.rows if row.version == version]
            by_optimizer = {row.optimizer: row.largest.value for row in rows}
            if rows:
                record = replace(
                    record,
                    equal=self.agree and all(row.equal for row in rows),
                    largest_difference=max(by_optimizer.values()),
                    differences=by_optimizer,
                )
            done.append(record)
        return done

    def tables(self, title: str) -> Stack:
        """Return largest differences by kind, with the place of the largest; losses; bytes sent per rank."""
        kinds = (f">{kind.removeprefix('gradient ')}" for kind in KINDS)
        heads = ("version", "optimizer", *kinds, ">ulps", "largest of the row is in")
        rows = [row.cells() for row in self.rows]
        equality = make_table(f"largest relative difference from one device: {title}", heads, rows)
        sent = make_table(
            "bytes a rank sent in the run, mean", ("version", "optimizer", ">counted", ">formula")
        )
        for row in self.rows:
            shown = "not counted" if row.counted is None else show_bytes(row.counted)
            sent.add_row(row.version, row.optimizer, shown, show_bytes(row.formula))
        losses = [
            f"loss of each step, {optimizer}: {' '.join(f'{loss:.10f}' for loss in values)}"
            for optimizer, values in self.losses.items()
        ]
        return Stack(equality, *losses, *([sent] if self.counted else []))

    def sentence(self) -> str:
        """Return one line: the claim that was proved, or the difference."""
        limit = TOLERANCE[self.dtype]
        if (largest := worst(row.largest for row in self.rows)).value > limit:
            return f"NOT equal to one device: {largest.where} differs by {largest.value:.1e}, {limit:.0e} is allowed"
        if (ulps := worst(row.ulps for row in self.rows if row.ulps)).value >= ULPS:
            return (
                f"NOT equal to one device: {ulps.where} differs by {ulps.value:.1e} times what a unit in the last "
                f"place of the weights moves it, less than {ULPS} is allowed"
            )
        if not self.bytes_agree:
            return "equal to one device, but the bytes counted are NOT those of the formula"
        return f"proved: equal to one device within {limit:.0e}{', bytes counted = formula' if self.counted else ''}"
