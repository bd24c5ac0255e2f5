"""Grid of ranks: its communication groups, and the block of each matrix that a rank holds.

              column 0   column 1   column 2        rank = (layer R + row) C + column
    row 0        0          1          2            row group      0 1 2        differ in their column
    row 1        3          4          5            column group   0 3          differ in their row
                                                    depth group    0 6 ...      differ in their layer
    A_MK  M over rows, K over columns
    B_KJ  K over rows, J over columns               K is cut over the layers first: each sums over its own part of it
    C_MJ  M over rows, J over columns               the rows of a block of C are cut once more over the layers

Sizes of pieces differ by at most one (`sizes_of`), so any shape fits any grid; a piece may be empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import isqrt

from common.comm import Group
from common.errors import UsageError
from common.launch.command_line import Count, Size, check_names
from common.lesson.matrices import ProductOptions, cut

ALGORITHMS = ("summa", "cannon")


def most_square(n: int) -> tuple[int, int]:
    """Return (rows, columns) of the grid of n ranks whose sides differ least, with rows <= columns."""
    rows = next(r for r in range(isqrt(n), 0, -1) if n % r == 0)
    return rows, n // rows


@dataclass(frozen=True)
class Grid:
    """Groups of this rank in the grid: its row, its column and its depth group."""

    row: Group
    column: Group
    depth: Group

    @property
    def rows(self) -> int:
        """Number of rows, R."""
        return self.column.size

    @property
    def columns(self) -> int:
        """Number of columns, C."""
        return self.row.size

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return self.depth.size


def check_grid(n: int, rows: int, columns: int, layers: int) -> None:
    """Raise UsageError unless n ranks make a grid of rows x columns in this many layers."""
    if layers < 1 or n % layers:
        fitting = ", ".join(str(x) for x in range(1, n + 1) if n % x == 0)
        raise UsageError(f"--layers {layers}: {n} ranks divide into {fitting} layers")
    if min(rows, columns) < 1 or rows * columns * layers != n:
        near = " ".join(map(str, most_square(n // layers)))
        raise UsageError(
            f"--grid {rows} {columns} --layers {layers} needs {rows * columns * layers} ranks, "
            f"here are {n}; --grid {near} would fit"
        )


def make_grid(group: Group, rows: int, columns: int, layers: int = 1, timeout: float | None = None) -> Grid:
    """Lay out the ranks of a group as a grid. Every rank of the group must call this.

    timeout: of the new process groups, in seconds. Raises UsageError unless the group has rows * columns *
    layers ranks.
    """
    check_grid(group.size, rows, columns, layers)
    layer, place = divmod(group.rank, rows * columns)
    r, c = divmod(place, columns)

    def rank(layer: int, r: int, c: int) -> int:
        return (layer * rows + r) * columns + c

    return Grid(
        group.part("row", [rank(layer, r, i) for i in range(columns)], timeout),
        group.part("column", [rank(layer, i, c) for i in range(rows)], timeout),
        group.part("depth", [rank(i, r, c) for i in range(layers)], timeout),
    )


@dataclass(frozen=True)
class Blocks:
    """Index ranges of this rank in a product of M x K by K x J."""

    shape: tuple[int, int, int]
    grid: Grid

    @property
    def rows(self) -> slice:
        """Range of M: the rows of the block of C that this rank computes."""
        return cut(slice(0, self.shape[0]), self.grid.rows, self.grid.column.rank)

    @property
    def inner(self) -> slice:
        """Range of K: this layer's part of the inner dimension, over which its ranks sum."""
        return cut(slice(0, self.shape[1]), self.grid.layers, self.grid.depth.rank)

    @property
    def columns(self) -> slice:
        """Range of J: the columns of the block of C that this rank computes."""
        return cut(slice(0, self.shape[2]), self.grid.columns, self.grid.row.rank)

    def place(self, name: str) -> tuple[slice, slice]:
        """Return (rows, columns) of this rank's block of "A", "B", "C" or of a gradient: "dA", "dB", "dC"."""
        grid = self.grid
        return {
            "A": (self.rows, cut(self.inner, grid.columns, grid.row.rank)),
            "B": (cut(self.inner, grid.rows, grid.column.rank), self.columns),
            "C": (cut(self.rows, grid.layers, grid.depth.rank), self.columns),
        }[name[-1]]


@dataclass(frozen=True)
class Panel:
    """Range of the inner dimension: columns of A in one grid column, rows of B in one grid row."""

    begin: int
    end: int
    column: int
    row: int


def panels(inner: slice, grid: Grid, each: int = 1) -> list[Panel]:
    """Cut the inner dimension into panels, each with one owner of A and one of B, and each panel into `each`.

    On a grid that is not square, A and B are cut at different indices, and a panel begins at every cut of
    either.
    """
    columns = [cut(inner, grid.columns, i) for i in range(grid.columns)]
    rows = [cut(inner, grid.rows, i) for i in range(grid.rows)]
    edges = sorted({edge for piece in columns + rows for edge in (piece.start, piece.stop)})
    found = []
    for begin, end in pairwise(edges):
        column = next(i for i, piece in enumerate(columns) if piece.start <= begin < piece.stop)
        row = next(i for i, piece in enumerate(rows) if piece.start <= begin < piece.stop)
        parts = min(each, end - begin)
        for part in (cut(slice(begin, end), parts, i) for i in range(parts)):
            found.append(Panel(part.start, part.stop, column, row))
    return found


@dataclass
class GridOptions(ProductOptions):
    """Sizes and grid of tp_summa.py."""

    grid: tuple[Count, Count] | None = None
    """Rows and columns of the grid of ranks; by default the most square one."""
    layers: Count = 1
    """Number of layers of the grid; each sums over its own part of the inner dimension."""
    algorithms: tuple[str, ...] = ()
    """Algorithms to run: summa, cannon; by default those that the grid allows."""
    panels: Size = 1
    """Number of panels in which SUMMA broadcasts a block."""
    overlap: bool = True
    """Broadcast the next panel while one is multiplied."""

    def validate(self, n: int) -> None:
        """Fill in the grid and the algorithms for n ranks. Raises UsageError for options that cannot run."""
        if self.grid is None:
            self.grid = most_square(max(1, n // self.layers))
        check_grid(n, *self.grid, self.layers)
        if not self.algorithms:
            self.algorithms = ALGORITHMS if self.grid[0] == self.grid[1] else ALGORITHMS[:1]
        check_names("algorithms", self.algorithms, ALGORITHMS)
