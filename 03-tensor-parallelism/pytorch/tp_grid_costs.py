"""Numbers sent by a product, one dimension against two, by formula: the table of tp_summa.py.

A_MK, B_KJ and C_MJ are each split into n blocks, before and after the product. The grid has R x C ranks in L
layers, n = R C L. Numbers that a rank sends, the mean over ranks:

    SUMMA            ((C-1) MK + (R-1) KJ) / n     forward; twice that backward: A and B again, and dA and dB
    1-D              the grids n x 1 (B moves) and 1 x n (A moves)
    Cannon, q x q    (q - 1/q) (MK + KJ) / n       forward; twice that backward
    L layers         (L-1) MJ / n                  more, forward (C) and backward (dC)

On a square grid SUMMA sends 2 (sqrt(n) - 1)/n N^2 of N x N, where 1-D sends (n-1)/n N^2 on any number of ranks.
In general 2-D wins where n > 4 max(M, J)/min(M, J): then 2 K sqrt(MJ/n) < K min(M, J).
"""

from __future__ import annotations

from fractions import Fraction

from rich.table import Table

from tp_grid import most_square

Shape = tuple[int, int, int]


def summa(shape: Shape, rows: int, columns: int, layers: int = 1) -> tuple[Fraction, Fraction]:
    """Return the numbers per rank that SUMMA sends (forward, backward), for sizes that divide evenly."""
    M, K, J = shape
    n = rows * columns * layers
    factors = Fraction((columns - 1) * M * K + (rows - 1) * K * J, n)
    terms = Fraction((layers - 1) * M * J, n)
    return factors + terms, 2 * factors + terms


def cannon(shape: Shape, q: int, layers: int = 1) -> tuple[Fraction, Fraction]:
    """Return the numbers per rank that Cannon sends (forward, backward), for sizes that divide evenly.

    The grid has q x q ranks in each of `layers` layers.
    """
    M, K, J = shape
    factors = Fraction(M * K + K * J, q * q * layers)  # the blocks of A and B that a rank holds
    skew, terms = Fraction(q - 1, q), Fraction((layers - 1) * M * J, q * q * layers)
    return (q - 1 + skew) * factors + terms, 2 * (q - 1 + skew) * factors + terms


def best_layers(shape: Shape, n: int) -> int:
    """Return the number of layers, each the most square grid, for which SUMMA sends least in both passes."""
    fitting = [layers for layers in range(1, n + 1) if n % layers == 0]
    return min(fitting, key=lambda layers: sum(summa(shape, *most_square(n // layers), layers)))


def table(shape: Shape, ranks: tuple[int, ...] = (4, 16, 64, 1024)) -> Table:
    """Return a table of MB sent per rank in float32, forward and in both passes, and of blocks of C held."""
    found = Table(
        title=f"MB a rank sends, {' x '.join(map(str, shape))}, float32, by formula", title_justify="left"
    )
    for column in ("n", "product", "grid", "forward", "with backward", "blocks of C held"):
        found.add_column(column, justify="left" if column in ("product", "grid") else "right")
    for n in ranks:
        rows, columns = most_square(n)
        layers = best_layers(shape, n)
        deep = most_square(n // layers)
        lines = [
            ("1-D, B moves", f"{n} x 1", summa(shape, n, 1), 1),
            ("1-D, A moves", f"1 x {n}", summa(shape, 1, n), 1),
            ("SUMMA", f"{rows} x {columns}", summa(shape, rows, columns), 1),
            ("SUMMA in layers", f"{deep[0]} x {deep[1]} x {layers}", summa(shape, *deep, layers), layers),
        ]
        if rows == columns:
            lines.insert(3, ("Cannon", f"{rows} x {columns}", cannon(shape, rows), 1))
        for name, grid, (forward, backward), held in lines:
            sizes = (f"{float(x) * 4e-6:,.2f}" for x in (forward, forward + backward))
            found.add_row(str(n) if name == lines[0][0] else "", name, grid, *sizes, str(held))
    return found
