"""Test matrices whose blocks each rank makes alone, bit for bit equal to those of the whole matrix.

    a = Matrix("spd", rows=4096, columns=4096, condition=1e6)
    mine = a.block(rows=slice(0, 1024), columns=slice(2048, 4096))

    python common/utils/matrix_generator.py --kind orthogonal --rows 300 --columns 200

Entries come from numbers by position (`common.random`), and every sum is either over the same few terms in the
same order for each entry, or correctly rounded (`math.fsum`): the cut of the matrix cannot change a bit.
Orthogonal matrices are products of k Householder reflections, kept as Q = I - Z V^T with k columns (Schreiber and
Van Loan, "A storage-efficient WY representation", 1989), so an entry takes k products and no other entry.

    m x n matrix, b entries in the block, N = max(m, n), k reflectors, r rank
    random, banded   O(b) time and memory
    low-rank         O(r b) time, O(b) memory for the block and r numbers for each of its rows and columns
    orthogonal, spd  O(k b + k^2 N) time, O(b + k N) memory
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from common import random
from common.errors import UsageError
from common.launch.command_line import Checked, Count, Within, parse
from common.launch.program import run_program
from common.launch.terminal import terminal

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Kind = Literal["random", "orthogonal", "low-rank", "banded", "spd"]
LARGEST = 4_000_000  # entries that the command line measures


@dataclass(frozen=True)
class Matrix(Checked):
    """A float64 matrix, determined by these fields. Raises UsageError for sizes that do not fit together."""

    kind: Kind = "random"
    """random: uniform in [-1, 1); orthogonal: orthonormal columns, or rows if wide; low-rank: exactly `rank`;
    banded: zero beyond `bandwidth` diagonals on each side; spd: symmetric positive definite."""
    rows: Count = 64
    columns: Count = 64
    seed: Annotated[int, Within(0, 2**64 - 1)] = 0
    rank: Count = 4
    """Rank of a low-rank matrix."""
    bandwidth: Annotated[int, Within(0, 10**9)] = 2
    """Nonzero diagonals on each side of the main diagonal of a banded matrix."""
    condition: Annotated[float, Within(1, 1e12)] = 100.0
    """Condition number of an spd matrix: largest eigenvalue 1, smallest 1 / condition, the others evenly
    between on a logarithmic scale."""
    reflectors: Annotated[int, Within(1, 1000)] = 8
    """Number of reflections whose product is Q of an orthogonal or spd matrix: more of them mix more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise UsageError(f"kind {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        if self.kind == "low-rank" and self.rank > min(self.rows, self.columns):
            most = min(self.rows, self.columns)
            raise UsageError(
                f"rank {self.rank} does not fit {self.rows} x {self.columns}; at most {most} does"
            )
        if self.kind == "spd" and self.rows != self.columns:
            near = f"{self.rows} x {self.rows} or {self.columns} x {self.columns}"
            raise UsageError(f"an spd matrix is square, not {self.rows} x {self.columns}; {near} would be")

    def block(self, rows: slice = slice(None), columns: slice = slice(None)) -> Array:
        """Return the block [rows, columns], made alone; by default the whole."""
        places = np.arange(*rows.indices(self.rows)), np.arange(*columns.indices(self.columns))
        return KINDS[self.kind](self, *places)

    def numbers(self, stream: int, index: Index) -> Array:
        """Return uniform numbers in [-1, 1), one per index."""
        return 2 * random.uniform(self.seed, stream, index) - 1


def outer_sum(left_Mk: Array, right_Nk: Array) -> Array:
    """Return left right^T, [M, N], each entry summed in one order; a BLAS orders its sums by the size."""
    out = np.zeros((len(left_Mk), len(right_Nk)))
    for left_M, right_N in zip(left_Mk.T, right_Nk.T, strict=True):
        out += left_M[:, None] * right_N
    return out


def dot(x: Array, y: Array) -> float:
    """Return the sum of x * y, rounded once at the end, so that its order does not matter."""
    return math.fsum((x * y).tolist())


def random_block(a: Matrix, i: Index, j: Index) -> Array:
    """Return independent entries, at the cost of the block alone."""
    return a.numbers(0, i[:, None] * a.columns + j)


def banded_block(a: Matrix, i: Index, j: Index) -> Array:
    """Return entries near the diagonal, at the cost of the block alone."""
    block = random_block(a, i, j)
    block[abs(i[:, None] - j) > a.bandwidth] = 0
    return block


def low_rank_block(a: Matrix, i: Index, j: Index) -> Array:
    """Return left times right factor, both of `rank` columns: cost of the block times the rank."""
    k = np.arange(a.rank)
    return outer_sum(a.numbers(1, i[:, None] * a.rank + k), a.numbers(2, j[:, None] * a.rank + k))


def reflections(a: Matrix) -> tuple[Array, Array]:
    """Return (Z, V), both [N, k]: Q = (I - tau_1 v_1 v_1^T) ... (I - tau_k v_k v_k^T) = I - Z V^T.

    tau = 2 / v^T v, and one more factor adds the column z = tau Q v to Z.
    """
    N = max(a.rows, a.columns)
    z_Nk, v_Nk = np.zeros((N, a.reflectors)), np.zeros((N, a.reflectors))
    for k in range(a.reflectors):
        v_N = a.numbers(3, k * N + np.arange(N))
        projections = [dot(v_Nk[:, b], v_N) for b in range(k)]
        q_N = v_N.copy()
        for b, projection in enumerate(projections):
            q_N -= z_Nk[:, b] * projection
        z_Nk[:, k], v_Nk[:, k] = 2 / dot(v_N, v_N) * q_N, v_N
    return z_Nk, v_Nk


def orthogonal_block(a: Matrix, i: Index, j: Index) -> Array:
    """Return a product of reflections: cost of the block, and of the reflections' vectors."""
    z_Nk, v_Nk = reflections(a)
    block: Array = (i[:, None] == j) - outer_sum(z_Nk[i], v_Nk[j])
    return block


def spd_block(a: Matrix, i: Index, j: Index) -> Array:
    """Return Q D Q^T = D - Z Y^T - Y Z^T with Y = D V - Z (V^T D V) / 2: symmetric to the last bit."""
    z_Nk, v_Nk = reflections(a)
    d_N = a.condition ** -np.linspace(0, 1, a.rows)
    dv_Nk = d_N[:, None] * v_Nk
    s_kk = np.array([[dot(v_N, dv_N) for v_N in v_Nk.T] for dv_N in dv_Nk.T])
    y_Nk = dv_Nk - outer_sum(z_Nk, s_kk) / 2
    both = outer_sum(z_Nk[i], y_Nk[j]) + outer_sum(y_Nk[i], z_Nk[j])  # (i, j) and (j, i) round alike
    block: Array = (i[:, None] == j) * d_N[j] - both
    return block


KINDS: dict[str, Callable[[Matrix, Index, Index], Array]] = {
    "random": random_block,
    "orthogonal": orthogonal_block,
    "low-rank": low_rank_block,
    "banded": banded_block,
    "spd": spd_block,
}


def properties(a: Matrix) -> dict[str, str]:
    """Return measured properties of the whole matrix by name. Takes a singular value decomposition."""
    whole = a.block()
    singular = np.linalg.svd(whole, compute_uv=False)
    rank = int((singular > singular[0] * max(whole.shape) * np.finfo(float).eps).sum())
    i, j = np.nonzero(whole)
    tall = whole if a.rows >= a.columns else whole.T
    gram = tall.T @ tall
    cut_i, cut_j = a.rows // 3, a.columns // 2
    parts = [
        [a.block(r, c) for c in (slice(cut_j), slice(cut_j, None))]
        for r in (slice(cut_i), slice(cut_i, None))
    ]
    return {
        "shape": f"{a.rows} x {a.columns}",
        "rank": str(rank),
        "2-norm": f"{singular[0]:.6g}",
        "condition number": f"{singular[0] / singular[-1]:.6g}" if rank == len(singular) else "infinite",
        "bandwidth": str(abs(i - j).max(initial=0)),
        "symmetric": "yes" if whole.shape == whole.T.shape and np.array_equal(whole, whole.T) else "no",
        "largest |Q^T Q - I|": f"{abs(gram - np.eye(len(gram))).max():.3g}",
        "four blocks made alone": "equal to the whole"
        if np.array_equal(np.block(parts), whole)
        else "DIFFERENT",
    }


def main() -> int:
    """Print the properties of a matrix."""
    a = parse(Matrix, "Measures a test matrix.")
    if a.rows * a.columns > LARGEST:
        raise UsageError(
            f"{a.rows} x {a.columns} takes too long to measure; at most {LARGEST} entries do not"
        )
    table = Table(title=f"{a.kind}, seed {a.seed}", show_header=False)
    for name, value in properties(a).items():
        table.add_row(name, value)
    terminal().print(table)
    return 0


if __name__ == "__main__":
    run_program(main)
