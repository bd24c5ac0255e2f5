"""Multiply shards by dp_matmul_mpi on every rank for each case of a list; rank 0 writes results as JSON.

python dp_matmul_mpi_worker.py RESULT CASES, under mpirun; a case is [shape, split, panels, dtype].
"""

import json
import sys

import numpy as np
from fived import collectives
from mpi.said import said_by
from mpi.worker import WORLD, write

import dp_matmul_mpi

CUT = {"rows": (0, None, 0), "columns": (None, 1, 1), "inner": (1, 0, 0)}  # A, B, C


def piece(x, dim):
    if dim is None:
        return x
    begin, end = collectives.piece(x.shape[dim], WORLD.size, WORLD.rank)
    return np.ascontiguousarray(x[begin:end] if dim == 0 else x[:, begin:end])


def joined(x, dim):
    parts = WORLD.allgather(x)
    if dim is not None:
        return np.concatenate(parts, dim)
    assert all(np.array_equal(parts[0], p) for p in parts)  # replicated: the same to the last bit
    return parts[0]


def apart(expected, x, dim):
    found = joined(x, dim)
    assert found.shape == expected.shape
    assert found.dtype == x.dtype
    return float(abs(found - expected).max() / abs(expected).max())


def case(shape, split, panels, dtype):
    m, k, j = shape
    draw = np.random.default_rng(5)
    a, b, dc = (draw.standard_normal(s).astype(dtype) for s in ((m, k), (k, j), (m, j)))
    of_a, of_b, of_c = CUT[split]
    mine = piece(a, of_a), piece(b, of_b)
    c = dp_matmul_mpi.multiply(*mine, WORLD, split, panels)
    da, db = dp_matmul_mpi.gradients(*mine, piece(dc, of_c), WORLD, split)
    a, b, dc = (x.astype(np.float64) for x in (a, b, dc))
    return [apart(a @ b, c, of_c), apart(dc @ b.T, da, of_a), apart(a.T @ dc, db, of_b)]


def refused():
    """Return the module's errors for invalid shapes, splits and types; every rank raises the same ones."""
    x = np.ones((4, 4))
    multiply = dp_matmul_mpi.multiply
    calls = [
        lambda: multiply(x, x, WORLD, "diagonal"),
        lambda: multiply(x, np.ones((3 * WORLD.size + 2, 4)), WORLD, "inner"),
        lambda: multiply(np.ones(4), x, WORLD, "rows"),
        lambda: multiply(x.astype(np.int64), x, WORLD, "rows"),
    ]
    return said_by(calls)


if __name__ == "__main__":
    write({"apart": [case(*c) for c in json.loads(sys.argv[2])], "refused": refused()})
