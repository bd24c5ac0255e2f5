"""Multiply shards by dp_matmul_mpi on the first 1 to 4 ranks for each of a list of cases; rank 0 writes JSON.

python dp_matmul_mpi_worker.py RESULT CASES, under mpirun; a case is [shape, split, panels, dtype].
"""

import json
import sys

import numpy as np
from fived import collectives
from mpi.said import said_by
from mpi.worker import on_comms, write

import dp_matmul_mpi

CUT = {"rows": (0, None, 0), "columns": (None, 1, 1), "inner": (1, 0, 0)}  # A, B, C


def piece(comm, x, dim):
    if dim is None:
        return x
    begin, end = collectives.piece(x.shape[dim], comm.size, comm.rank)
    return np.ascontiguousarray(x[begin:end] if dim == 0 else x[:, begin:end])


def joined(comm, x, dim):
    parts = comm.allgather(x)
    if dim is not None:
        return np.concatenate(parts, dim)
    assert all(np.array_equal(parts[0], p) for p in parts)  # replicated: the same to the last bit
    return parts[0]


def apart(comm, expected, x, dim):
    found = joined(comm, x, dim)
    assert found.shape == expected.shape
    assert found.dtype == x.dtype
    return float(abs(found - expected).max() / abs(expected).max())


def case(comm, shape, split, panels, dtype):
    m, k, j = shape
    draw = np.random.default_rng(5)
    a, b, dc = (draw.standard_normal(s).astype(dtype) for s in ((m, k), (k, j), (m, j)))
    of_a, of_b, of_c = CUT[split]
    mine = piece(comm, a, of_a), piece(comm, b, of_b)
    c = dp_matmul_mpi.multiply(*mine, comm, split, panels)
    da, db = dp_matmul_mpi.gradients(*mine, piece(comm, dc, of_c), comm, split)
    a, b, dc = (x.astype(np.float64) for x in (a, b, dc))
    expected = (a @ b, c, of_c), (dc @ b.T, da, of_a), (a.T @ dc, db, of_b)
    return [apart(comm, *each) for each in expected]


def refused(comm):
    """Return the module's errors for invalid shapes, splits and types; every rank raises the same ones."""
    x = np.ones((4, 4))
    multiply = dp_matmul_mpi.multiply
    calls = [
        lambda: multiply(x, x, comm, "diagonal"),
        lambda: multiply(x, np.ones((3 * comm.size + 2, 4)), comm, "inner"),
        lambda: multiply(np.ones(4), x, comm, "rows"),
        lambda: multiply(x.astype(np.int64), x, comm, "rows"),
    ]
    return said_by(calls)


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    write(on_comms(lambda comm: {"apart": [case(comm, *c) for c in cases], "refused": refused(comm)}))
