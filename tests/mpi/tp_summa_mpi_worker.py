"""Multiply blocks by tp_summa_mpi on the first ranks for each of a list of cases; rank 0 writes JSON.

python tp_summa_mpi_worker.py RESULT CASES, under mpirun; CASES is {number of ranks: cases}, and a case
[shape, grid, panels, dtype, carrier, overlap].
"""

import json
import sys

import numpy as np
from fived import collectives
from mpi.said import said_by
from mpi.worker import on_comms, write

import tp_summa_mpi


def place(shape, grid, rank):
    """Return the rows and columns of a rank's block, as slices."""
    r, c = divmod(rank, grid[1])
    return (
        slice(*collectives.piece(shape[0], grid[0], r)),
        slice(*collectives.piece(shape[1], grid[1], c)),
    )


def apart(comm, expected, x, grid):
    """Return the largest relative difference between the blocks of all ranks and numpy's matrix."""
    found, times = np.full(expected.shape, np.nan), 0
    for rank, block in enumerate(comm.allgather(x)):
        found[place(expected.shape, grid, rank)] = block
        times += block.size
    assert times == expected.size
    return float(abs(found - expected).max() / abs(expected).max())


def case(comm, shape, grid, panels, dtype, carrier, overlap):
    m, k, j = shape
    draw = np.random.default_rng(5)
    whole = [draw.standard_normal(s).astype(dtype) for s in ((m, k), (k, j), (m, j))]
    a, b, dc = (np.ascontiguousarray(x[place(x.shape, grid, comm.rank)]) for x in whole)
    how = dict(grid=tuple(grid), panels=panels, carrier=carrier)
    c = tp_summa_mpi.multiply(a, b, comm, overlap=overlap, **how)
    da, db = tp_summa_mpi.gradients(a, b, dc, comm, **how)
    assert c.dtype == da.dtype == db.dtype == a.dtype
    a, b, dc = (x.astype(np.float64) for x in whole)
    return [apart(comm, *each, grid) for each in ((a @ b, c), (dc @ b.T, da), (a.T @ dc, db))]


def refused(comm):
    """Return the module's errors for invalid arguments; every rank raises the same ones."""
    x = np.ones((4, 4))
    multiply = tp_summa_mpi.multiply
    calls = [
        lambda: multiply(x, x, comm, carrier="pigeon"),
        lambda: multiply(x, x, comm, grid=(comm.size, 2)),
        lambda: multiply(x, np.ones((5, 4)), comm, grid=(1, comm.size)),
        lambda: multiply(np.ones(4), x, comm),
        lambda: multiply(x.astype(np.int64), x, comm),
    ]
    return said_by(calls)


if __name__ == "__main__":
    cases = {int(size): given for size, given in json.loads(sys.argv[2]).items()}

    def work(comm):
        return {"apart": [case(comm, *c) for c in cases[comm.size]], "refused": refused(comm)}

    write(on_comms(work, cases))
