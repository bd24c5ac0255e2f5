"""Train the layer of tp_mpi on the first 1 to 4 ranks for each of a list of cases; rank 0 writes JSON.

python tp_mpi_worker.py RESULT CASES, under mpirun; a case is a dictionary of `train`'s arguments.
"""

import json
import sys

import numpy as np
from mpi.said import said_by
from mpi.worker import on_comms, write

import tp_mpi


def whole(comm, parts, places, shapes):
    """Assemble sharded parameters, and check that replicated parts agree to the last bit."""
    out = {}
    for name, part in parts.items():
        out[name] = np.full(shapes[name], np.nan)
        for piece, place in comm.allgather((part, places[name])):
            there = out[name][place]
            assert np.isnan(there).all() or np.array_equal(there, piece), name
            out[name][place] = piece
    return {name: values.tolist() for name, values in out.items()}


def train(comm, shape, tokens, steps, optimizer, reduction, dtype):
    width, heads, mlp_width = shape
    layer = tp_mpi.Layer(width, heads, mlp_width, comm, 3, dtype, reduction)
    start = tp_mpi.Layer(width, heads, mlp_width, seed=3, dtype=dtype).weights()
    shapes = {name: values.shape for name, values in start.items()}
    draw, places = np.random.default_rng(11), layer.places()
    losses, norms = [], []
    for _ in range(steps):
        x, target = (draw.standard_normal((*tokens, width)).astype(dtype) for _ in range(2))
        y = layer.forward(x)
        count = tokens[0] * tokens[1]
        losses.append(float(np.square(y - target).sum() / 2 / count))
        dx = layer.backward((y - target) / np.asarray(count, dtype))
        norms.append(layer.gradient_norm())
        gradients = whole(comm, layer.gradients(), places, shapes)
        sent = [layer.bytes_sent, layer.bytes_by_formula(count)]
        layer.sgd(0.1) if optimizer == "sgd" else layer.adamw(1e-3, epsilon=1e-5)
    return {
        "losses": losses,
        "norms": norms,
        "dx": dx.tolist(),
        "gradients": gradients,
        "weights": whole(comm, layer.weights(), places, shapes),
        "bytes": comm.allgather(sent),
        "numbers": comm.allgather(sum(w.size for w in layer.weights().values())),
    }


def refused(comm):
    """Return the module's errors for invalid arguments; every rank raises the same ones."""
    layer = tp_mpi.Layer(16, 4, 32, comm)
    calls = [
        lambda: tp_mpi.Layer(16, comm.size - 1, 32, comm) if 16 % max(1, comm.size - 1) == 0 else layer,
        lambda: layer.forward(np.ones((2, 16))),
        lambda: layer.forward(np.ones((1, 2, 16), np.float32)),
        lambda: layer.backward(np.ones((1, 2, 16))),
        lambda: layer.set_weights({}),
    ]
    return said_by(calls)


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    write(on_comms(lambda comm: {"cases": [train(comm, **c) for c in cases], "refused": refused(comm)}))
