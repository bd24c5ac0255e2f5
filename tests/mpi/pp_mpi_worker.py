"""Train the MLP of pp_mpi on worlds of 1 to 4 ranks for each case of a list; rank 0 writes results as JSON.

python pp_mpi_worker.py RESULT CASES, under mpirun; a case is a dictionary of `train`'s arguments.
"""

import functools
import json
import sys

import numpy as np
from mpi.said import said_by
from mpi.worker import WORLD, on_first_ranks, write

import pp_mpi
from pp_schedules import make_schedule


@functools.cache
def world(size):
    return WORLD.Create_group(WORLD.group.Incl(range(size)))


def train(size, sizes, schedule, micro_batches, batch, steps, optimizer, dtype="float64"):
    """Train this rank's stages. On ranks that do not read them, x is NaN and y is 0."""
    comm, plan = world(size), make_schedule(schedule, size, micro_batches)
    model = pp_mpi.MLP(sizes, str(plan), comm, dtype, seed=3)
    draw = np.random.default_rng(7)
    losses, norms = [], []
    for _ in range(steps):
        x = draw.standard_normal((batch, sizes[0]))
        y = draw.integers(sizes[-1], size=batch, dtype=np.uint8)
        if plan.owner[0] != comm.rank:
            x[:] = np.nan
        if plan.owner[-1] != comm.rank:
            y[:] = 0
        losses.append(model.loss_and_gradients(x.astype(dtype), y))
        norms.append(model.gradient_norm())
        gradients = model.gradients()
        model.sgd(0.1) if optimizer == "sgd" else model.adamw(1e-3, epsilon=1e-5)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": {name: g.tolist() for name, g in gradients.items()},
        "weights": {name: w.tolist() for name, w in model.weights().items()},
        "bytes": [model.bytes_sent, model.bytes_by_formula(batch)],
        "buffers": model.buffer_bytes,
        "events": model.events(),
    }


def refused(size, sizes):
    """Return the module's errors for invalid arguments; every rank raises the same ones."""
    comm = world(size)
    lists = str(make_schedule("1f1b", size, 4))
    calls = [
        lambda: pp_mpi.MLP(sizes, str(make_schedule("1f1b", size + 1, 4)), comm),
        lambda: pp_mpi.MLP(sizes[:size], lists, comm),
        lambda: pp_mpi.MLP(sizes, lists, comm).loss_and_gradients(
            np.ones((3, sizes[0])), np.zeros(3, np.uint8)
        ),
        lambda: pp_mpi.MLP(sizes, lists, comm).set_weights({}),
        lambda: pp_mpi.MLP(sizes, lists, comm, "float16"),
    ]
    return said_by(calls)


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    write(
        on_first_ranks(
            range(1, WORLD.size + 1),
            lambda size: ([train(size, **case) for case in cases], refused(size, cases[0]["sizes"])),
        )
    )
