"""Train the mixture of ep_mpi on the first 1 to 4 ranks for each of a list of cases; rank 0 writes JSON.

python ep_mpi_worker.py RESULT CASES, under mpirun; a case holds `train`'s arguments after the first.
"""

import json
import sys

import numpy as np
from mpi.ep_mpi_inputs import all_to_the_first, drawn
from mpi.said import said_by
from mpi.worker import on_comms, write

import ep_mpi


def whole(comm, parts):
    """Stack the experts of all ranks, and check that the router is the same on every rank."""
    stacked = {}
    for name, part in parts.items():
        pieces = comm.allgather(part)
        if name == "router.weight":
            assert all(np.array_equal(piece, pieces[0]) for piece in pieces)
        stacked[name] = (part if name == "router.weight" else np.concatenate(pieces)).tolist()
    return stacked


def train(comm, shape, tokens, steps, optimizer, mlp, router, dtype, collapsed=False):
    """Train on tokens[rank] tokens on this rank; the last rank of a smaller world takes the rest."""
    begin = sum(tokens[: comm.rank])
    mine = slice(begin, sum(tokens) if comm.rank == comm.size - 1 else begin + tokens[comm.rank])
    layer = ep_mpi.Layer(*shape, comm, 3, dtype, mlp, router)
    if collapsed:
        layer.set_weights(all_to_the_first(ep_mpi.Layer(*shape, None, 3, dtype, mlp, router).weights()))
    found = {"losses": [], "norms": []}
    for step in range(steps):
        x, target = (a[mine] for a in drawn(sum(tokens), shape[0], step, dtype, collapsed))
        away = layer.forward(x) - target
        found["losses"].append(comm.allreduce(float(np.square(away).sum()) / 2 / sum(tokens)))
        dx = layer.backward(away / np.asarray(sum(tokens), dtype))
        found["norms"].append(layer.gradient_norm())
        gradients = layer.gradients()
        layer.sgd(0.1) if optimizer == "sgd" else layer.adamw(1e-3, epsilon=1e-5)
    return found | {
        "dx": np.concatenate(comm.allgather(dx)).tolist(),
        "choices": comm.allgather(layer.choices.tolist()),
        "experts": comm.allgather([layer.experts.start, layer.experts.stop]),
        "bytes": comm.allgather(layer.bytes_sent),
        "gradients": whole(comm, gradients),
        "weights": whole(comm, layer.weights()),
    }


def refused(comm):
    """Return the module's errors for invalid arguments; every rank raises the same ones."""
    layer = ep_mpi.Layer(8, 6, 5, comm=comm)
    calls = [
        lambda: ep_mpi.Layer(8, 6, max(1, comm.size - 1), 1, comm),
        lambda: layer.forward(np.ones((3, 7))),
        lambda: layer.forward(np.ones((3, 8), np.float32)),
        lambda: layer.backward(np.ones((3, 8))),
        lambda: layer.set_weights({}),
    ]
    return said_by(calls)


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    write(on_comms(lambda comm: ([train(comm, **case) for case in cases], refused(comm))))
