"""Multiply blocks by tp_summa_mpi on every rank for each case of a list; rank 0 writes results as JSON.

python tp_summa_mpi_worker.py RESULT CASES, under mpirun; a case is [shape, grid, panels, dtype, carrier, overlap].
"""

import json
import sys

import numpy as np
from fived import collectives
from mpi.said import said_by
from mpi.worker import WORLD, write

import tp_summa_mpi


def place(shape, grid, rank):
    """Return the rows and columns of a rank's block, as slices."""
    r, c = divmod(rank, grid[1])
    return (
        slice(*collectives.piece(shape[0], grid[0], r)),
        slice(*collectives.piece(shape[1], grid[1], c)),
    )


def apart(expected, x, grid):
    """Return the largest relative difference between the blocks of all ranks and numpy's matrix."""
    found, times = np.full(expected.shape, np.nan), 0
    for rank, block in enumerate(WORLD.allgather(x)):
        found[place(expected.shape, grid, rank)] = block
        times += block.size
    assert times == expected.size
    return float(abs(found - expected).max() / abs(expected).max())


def case(shape, grid, panels, dtype, carrier, overlap):
    m, k, j = shape
    draw = np.random.default_rng(5)
    whole = [draw.standard_normal(s).astype(dtype) for s in ((m, k), (k, j), (m, j))]
    a, b, dc = (np.ascontiguousarray(x[place(x.shape, grid, WORLD.rank)]) for x in whole)
    how = dict(grid=tuple(grid), panels=panels, carrier=carrier)
    c = tp_summa_mpi.multiply(a, b, WORLD, overlap=overlap, **how)
    da, db = tp_summa_mpi.gradients(a, b, dc, WORLD, **how)
    assert c.dtype == da.dtype == db.dtype == a.dtype
    a, b, dc = (x.astype(np.float64) for x in whole)
    return [apart(a @ b, c, grid), apart(dc @ b.T, da, grid), apart(a.T @ dc, db, grid)]


def refused():
    """Return the module's errors for invalid arguments; every rank raises the same ones."""
    x = np.ones((4, 4))
    multiply = tp_summa_mpi.multiply
    calls = [
        lambda: multiply(x, x, WORLD, carrier="pigeon"),
        lambda: multiply(x, x, WORLD, grid=(WORLD.size, 2)),
        lambda: multiply(x, np.ones((5, 4)), WORLD, grid=(1, WORLD.size)),
        lambda: multiply(np.ones(4), x, WORLD),
        lambda: multiply(x.astype(np.int64), x, WORLD),
    ]
    return said_by(calls)


if __name__ == "__main__":
    write({"apart": [case(*c) for c in json.loads(sys.argv[2])], "refused": refused()})
