"""Save and restore checkpoints under one mpirun, over our process group; write names that differ as JSON.

mpirun -np 2 python -m mpi4py tests/mpi/hybrid_checkpoint_worker.py result.json folder
"""

from __future__ import annotations

import sys
from pathlib import Path

from mpi.worker import write
from placed import entries, spoil, wrong

from common import comm
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime, runtime

from hybrid_checkpoint import Checkpoints


def travel(rt: Runtime, folder: Path) -> list[str]:
    """Save on one mesh and restore on another, then asynchronously; return the names that differ."""
    bad = []
    for step, (there, here) in enumerate([({"pp": 2}, {"tp": 2}), ({"dp": 2}, {"ep": 2})], 1):
        saving, mesh = Mesh(rt.world, **there), Mesh(rt.world, **here)
        checkpoints = Checkpoints(folder, saving, asynchronous=step == 2)
        checkpoints.save(step, entries(saving, True), {})
        checkpoints.finish()
        mine = spoil(entries(mesh, False))
        assert Checkpoints(folder, mesh).restore(mine) == {"step": step}
        bad += wrong(mine, mesh, False)
    return [name for names in comm.everyones(bad, rt.world) for name in names]


with runtime() as rt:
    assert rt.backend == "mpi"
    write(travel(rt, Path(sys.argv[2])))
