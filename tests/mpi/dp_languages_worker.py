"""Train the MLP in every language on the world's first ranks, for each of a list of options, and compare.

python dp_languages_worker.py RESULT CASES, under mpirun; CASES is {number of ranks: [LanguageOptions as dict]}.
For each case rank 0 writes differences from one device and between versions (maxima over ranks), and bytes,
counted and by formula.
"""

import itertools
import json
import sys
from dataclasses import replace

import mpi4py.MPI
import torch.distributed as dist
from mpi.worker import WORLD, on_first_ranks, write

from common.comm import Group
from common.launch.runtime import runtime
from common.lesson.equality import OPTIMIZERS, compare

from dp_languages import LOOPS, LanguageOptions, prepare
from dp_mlp import train


def worst(found):
    """Return {kind: [largest difference over all ranks, where]}."""
    everyones = mpi4py.MPI.COMM_WORLD.allgather({kind: (d.value, d.where) for kind, d in found.items()})
    return {kind: max(each[kind] for each in everyones) for kind in found}


def outcome(rt, options):
    """Return one case's differences from one device and between versions; bytes counted and by formula."""
    prepare(rt, options)
    one, pairs, sent = {}, {}, {}
    for optimizer in OPTIMIZERS:
        (reference, *_), runs = train(rt, options, LOOPS, "one device", optimizer), {}
        for name in options.versions:
            runs[name], counted, formula = train(rt, options, LOOPS, name, optimizer)
            one[f"{name}, {optimizer}"] = worst(compare(reference, runs[name]))
            sent[name] = [str(counted), str(formula)]
        for a, b in itertools.combinations(runs, 2):
            pairs[f"{a} and {b}, {optimizer}"] = worst(compare(runs[a], runs[b]))
    return {"one device": one, "one another": pairs, "bytes": sent}


def first_ranks(rt, size, comm, pg):
    """Return the runtime of the first `size` ranks; set mpi4py's COMM_WORLD, which lessons use, to theirs."""
    mpi4py.MPI.COMM_WORLD = comm
    world = Group("world", rt.rank, size, tuple(range(size)), pg)
    return replace(rt, world_size=size, local_world_size=size, world=world)


if __name__ == "__main__":
    cases = {int(size): options for size, options in json.loads(sys.argv[2]).items()}
    with runtime() as rt:
        comms = {size: WORLD.Split(int(rt.rank < size), rt.rank) for size in cases}
        groups = {size: dist.new_group(list(range(size))) if size > 1 else None for size in cases}

        def work(size):
            part = first_ranks(rt, size, comms[size], groups[size])
            return [outcome(part, LanguageOptions(**case)) for case in cases[size]]

        found = on_first_ranks(cases, work)
        mpi4py.MPI.COMM_WORLD = WORLD
        write({size: outcomes[0] for size, outcomes in found.items()})
