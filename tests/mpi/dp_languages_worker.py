"""Trains the MLP in every language, for each of a list of options, and compares.

python dp_languages_worker.py RESULT CASES, under mpirun; a case is a dictionary of MLPOptions. Rank 0 writes for each
case, as the maximum over ranks, differences from one device and between versions, and bytes counted and by formula.
"""

import itertools
import json
import sys
from pathlib import Path

from dp_languages import bytes_by_formula, prepare
from dp_mlp import MLPOptions, one_device, train
from mpi4py import MPI

from common.equality import OPTIMIZERS, compare
from common.runtime import runtime


def worst(found):
    """{kind: [largest difference of any rank, where]}"""
    everyones = MPI.COMM_WORLD.allgather({kind: (d.value, d.where) for kind, d in found.items()})
    return {kind: max(each[kind] for each in everyones) for kind in found}


def outcome(rt, options):
    """What one case found."""
    prepare(rt, options)
    one, pairs, sent = {}, {}, {}
    for optimizer in OPTIMIZERS:
        reference, runs = one_device(optimizer, options), {}
        for name in options.versions:
            runs[name], counted = train(name, optimizer, rt, options)
            one[f"{name}, {optimizer}"] = worst(compare(reference, runs[name]))
            sent[name] = [str(counted), str(bytes_by_formula(name, rt.world, options))]
        for a, b in itertools.combinations(runs, 2):
            pairs[f"{a} and {b}, {optimizer}"] = worst(compare(runs[a], runs[b]))
    return {"one device": one, "one another": pairs, "bytes": sent}


if __name__ == "__main__":
    with runtime() as rt:
        outcomes = [outcome(rt, MLPOptions(**case)) for case in json.loads(sys.argv[2])]
        if rt.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(outcomes))
