"""Train the GPT-2 of hybrid_mpi on each of a list of meshes, on the first ranks; rank 0 writes results.

python hybrid_mpi_worker.py RESULT CASES, under mpirun; a case is a dictionary of `train`'s arguments. Numbers go
as JSON to RESULT, whole tensors of case i to i.npz beside it.
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np
from mpi.said import said_by
from mpi.worker import WORLD, on_first_ranks, write

import hybrid_mpi


@functools.cache
def first(size):
    """Return the communicator of the first `size` ranks, on these."""
    return WORLD.Create_group(WORLD.group.Incl(range(size)))


def whole(comm, parts, places):
    """Return the whole tensors, on rank 0, and the names of those whose replicas differ in a bit."""
    out, apart = {}, set()
    for of_rank in comm.gather((parts, places)) or ():
        for (name, part), (shape, begin) in zip(of_rank[0].items(), of_rank[1].values(), strict=True):
            there = out.setdefault(name, np.full(shape, np.nan))
            box = there[tuple(slice(b, b + n) for b, n in zip(begin, part.shape, strict=True))]
            if not np.isnan(box).all() and not np.array_equal(box, part):
                apart.add(name)
            box[...] = part
    return out, sorted(apart)


def train(case, shape, sequence, mesh, lists, batches, optimizer, order, mixture):
    """Train on the mesh; batches: per step, tokens and targets of the global batch."""
    comm = first(int(np.prod(mesh)))
    model = hybrid_mpi.GPT2(*shape, comm, mesh, lists, sequence, order, seed=3, **mixture)
    _, dp, ep, sp, tp = mesh
    place, places = comm.rank // (sp * tp) % (dp * ep), model.places()
    losses, norms, sent, tensors, apart = [], [], [], {}, []
    for step, (tokens, targets) in enumerate(batches):
        cuts = [len(tokens) * p // (dp * ep) for p in (place, place + 1)]
        mine = (np.array(x[slice(*cuts)], np.int64) for x in (tokens, targets))
        losses.append(model.loss_and_gradients(*mine))
        sent.append([model.bytes_sent, model.bytes_by_formula])
        norms.append(model.gradient_norm())
        gradients, other = whole(comm, model.gradients(), places)
        tensors |= {f"gradients {step} {name}": x for name, x in gradients.items()}
        apart += other
        model.sgd(0.1) if optimizer == "sgd" else model.adamw(1e-3, epsilon=1e-5)
    weights, other = whole(comm, model.weights(), places)
    tensors |= {f"weights {name}": x for name, x in weights.items()}
    if comm.rank == 0:
        np.savez(Path(sys.argv[1]).with_name(f"{case}.npz"), **tensors)
    return {"losses": losses, "norms": norms, "apart": apart + other, "bytes": sent}


def refused(shape, sequence, lists):
    """Return the module's errors on one rank."""
    make = functools.partial(hybrid_mpi.GPT2, *shape, first(1))
    small = np.zeros((1, sequence), np.int64)
    calls = [
        lambda: make((1, 2, 1, 1, 1), lists, sequence),
        lambda: make((1, 1, 1, 1, 1), "F 0 0", sequence),
        lambda: make((1, 1, 1, 1, 1), lists, shape[3] + 1),
        lambda: make((1, 1, 1, 1, 1), lists, sequence, "spiral"),
        lambda: make((1, 1, 1, 1, 1), lists, sequence, experts=2, experts_per_token=3),
        lambda: make((1, 1, 1, 1, 1), lists, sequence, experts=2, router="sigmoid"),
        lambda: make((-1, -1, 1, 1, 1), lists, sequence),
        lambda: hybrid_mpi.GPT2(*shape[:2], 0, *shape[3:], first(1), (1, 1, 1, 1, 1), lists, sequence),
        lambda: make((1, 1, 1, 1, 1), lists, sequence).loss_and_gradients(small, small + 999),
        lambda: make((1, 1, 1, 1, 1), lists, sequence).loss_and_gradients(small - 5, small),
        lambda: make((1, 1, 1, 1, 1), lists, sequence).loss_and_gradients(small[:, 1:], small[:, 1:]),
    ]
    return said_by(calls)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[2]).read_text())
    found = []
    for case in given["cases"]:
        size = int(np.prod(case["mesh"]))
        ranks = on_first_ranks(
            [size], lambda _, case=case: train(**given["all"], batches=given["batches"], **case)
        )
        found.append(ranks[size])
    says = on_first_ranks(
        [1], lambda _: refused(given["all"]["shape"], given["all"]["sequence"], given["one"])
    )
    write({"cases": found, "refused": says[1][0]})
