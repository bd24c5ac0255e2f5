"""The communication ledger: every collective and every message adds a row.

A row holds the bytes of its call by formula: for a collective the bytes that one rank sends on average in the
bandwidth-optimal algorithm (an all-reduce of x over n ranks: 2(n-1)/n |x| bytes), for a message its own size.
They are kept as fractions, so that `counted == formula` is an equality and not a tolerance. The calls of
common/comm/calls.py send these bytes: tests/test_wire.py compares them with the counters of a private network
interface, within 3 % for headers, on gloo and on MPI over TCP. Calls that libraries make (common/comm/listen.py)
are counted by formula alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from rich.table import Table

_open: list[Ledger] = []
paused = False  # True inside `uncounted`


@dataclass(frozen=True)
class Row:
    """One call: operation, axis, bytes sent by this rank, seconds this rank was blocked in it."""

    op: str
    axis: str
    bytes: Fraction
    seconds: float


@dataclass(eq=False)  # compared by identity, not by content
class Ledger:
    """Ledger of all communication inside its `with` block.

    Rows are added from the thread that communicates, which in a backward pass need not be the main one.
    """

    rows: list[Row] = field(default_factory=list)

    def __enter__(self) -> Ledger:
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)

    def bytes(self, op: str | None = None, axis: str | None = None) -> Fraction:
        """Return the bytes sent by this rank, of all rows or of one operation or axis."""
        rows = (r for r in self.rows if op in (None, r.op) and axis in (None, r.axis))
        return sum((r.bytes for r in rows), Fraction(0))

    def seconds(self) -> float:
        """Return the seconds this rank was blocked in communication."""
        return sum(r.seconds for r in self.rows)

    def seconds_by_axis(self) -> dict[str, float]:
        """Return the seconds blocked by axis, or group of axes."""
        blocked: dict[str, float] = {}
        for row in self.rows:
            blocked[row.axis] = blocked.get(row.axis, 0.0) + row.seconds
        return blocked

    def table(self, title: str = "communication of this rank") -> Table:
        """Return a table with a line per operation and axis: calls, bytes, seconds blocked."""
        table = Table(title=title, title_justify="left")
        for name in ("operation", "axis", "calls", "bytes sent", "seconds blocked"):
            table.add_column(name, justify="left" if name in ("operation", "axis") else "right")
        for op, axis in sorted({(r.op, r.axis) for r in self.rows}):
            rows = [r for r in self.rows if (r.op, r.axis) == (op, axis)]
            sent, seconds = sum(r.bytes for r in rows), sum(r.seconds for r in rows)
            table.add_row(op, axis, str(len(rows)), show_bytes(sent), f"{seconds:.4f}")
        return table


@contextmanager
def uncounted() -> Iterator[None]:
    """Pause all ledgers inside the block: gathering tensors for a proof is not part of the run's cost."""
    global paused
    before, paused = paused, True
    try:
        yield
    finally:
        paused = before


def record(op: str, axis: str, sent: Fraction | int, seconds: float) -> None:
    """Add a row to every open ledger; `sent` is in bytes."""
    if not paused:
        for ledger in _open:
            ledger.rows.append(Row(op, axis, Fraction(sent), seconds))


def show_bytes(sent: Fraction | int) -> str:
    """Format bytes: `12,345,678`, with one decimal for a fraction."""
    return f"{int(sent):,}" if Fraction(sent).denominator == 1 else f"{float(sent):,.1f}"
