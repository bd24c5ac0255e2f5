"""Train the MLP of dp_mpi on the first 1 to 4 ranks for each of a list of cases; rank 0 writes JSON.

python dp_mpi_worker.py RESULT CASES, under mpirun; a case is a dictionary of `train`'s arguments.
"""

import json
import sys

import numpy as np
from fived import collectives, text
from mpi.worker import on_comms, write
from mpi4py import MPI

import dp_mpi

SOURCE = text.load("")[0]


def spread(comm, arrays):
    """Return the largest difference of any element between any two ranks."""
    largest = np.concatenate([a.ravel() for a in arrays.values()])
    smallest = largest.copy()
    comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    comm.Allreduce(MPI.IN_PLACE, smallest, MPI.MIN)
    return float(np.max(largest - smallest))


def train(comm, sizes, batch, steps, micro_batches, optimizer, **options):
    model = dp_mpi.MLP(sizes, comm=comm, seed=3 + comm.rank, **options)
    begin, end = collectives.piece(batch, comm.size, comm.rank)
    losses, norms = [], []
    for step in range(steps):
        x, y = text.mlp_samples(SOURCE, 3, step, begin, end, sizes[0] // 8)
        x *= 1 + np.arange(1, sizes[0] + 1) / 64  # see test_dp_mpi.py
        losses.append(model.loss_and_gradients(x, y, batch, micro_batches))
        norms.append(model.gradient_norm())
        gradients = model.gradients()
        model.sgd(0.1) if optimizer == "sgd" else model.adamw(1e-3)
    weights = model.weights()
    return {
        "losses": losses,
        "norms": norms,
        "gradients": {name: g.tolist() for name, g in gradients.items()},
        "weights": {name: w.tolist() for name, w in weights.items()},
        "apart": max(spread(comm, gradients), spread(comm, weights)),
        "bytes": comm.allgather(model.bytes_sent),
        "state": comm.allgather(model.state_bytes),
    }


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    write(on_comms(lambda comm: [train(comm, **case) for case in cases]))
