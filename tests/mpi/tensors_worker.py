"""Check split tensors by random examples on MPI, whose ranks exchange views with gaps.

python tensors_worker.py EXAMPLES, under mpirun; the exit code says whether all agree with torch.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import tensor_cases as cases
import torch
from test_collectives import exchange_views
from test_tensors import move
from test_tensors_convolution import convolve
from test_tensors_fourier import matrices, memory
from torch import Tensor

from common.launch.runtime import Runtime, runtime
from common.tensors import Grid, Partial, Replicate, Shard, fft2
from common.tensors.layout import Placement
from common.utils import pages


def is_shared(x: Tensor) -> bool:
    """Return True if x lies in memory that the ranks of the host share."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        lo, hi = (int(end, 16) for end in line.split()[0].split("-"))
        if lo <= x.data_ptr() < hi:
            return "/fived-" in line
    return False


def has_room() -> bool:
    """Return True if shared results have room here; containers often give /dev/shm 64 MB."""
    return shutil.disk_usage("/dev/shm").free > 2**30


def write_straight(rt: Runtime) -> None:
    """Move matrices whose pieces are so long that ranks write them straight into the results of others."""
    grid = Grid(rt.world)
    rows, columns = Shard(0), Shard(1)
    uneven = Shard(0, (1300, *[0] * (rt.world_size - 2), 7))
    placements: list[Placement] = [rows, columns, uneven, Replicate(), Partial()]
    for dtype in (torch.float64, torch.complex64):
        whole = cases.numbers((1307, 603), torch.float64).to(dtype)
        for one, other in itertools.permutations(placements, 2):
            x = cases.spread(whole, grid, (one,))
            moved = x.redistribute(other)
            exact = other != Partial() and one != Partial()
            found = moved.redistribute(Replicate()).local
            assert torch.equal(found, whole) if exact else torch.allclose(found, whole, 1e-2, 1e-2), (
                one,
                other,
            )
            if (one, other) in ((rows, columns), (columns, Replicate())) and rt.rank == 0:
                assert is_shared(moved.local) or not has_room(), (one, other)
    whole = cases.numbers((700, 1030), torch.complex128)
    for order in ("natural", "transposed"):
        found = fft2(cases.spread(whole, grid, (rows,)), order=order)
        cases.assert_close(found.full(), torch.fft.fft2(whole), times=500)
        if order == "natural":
            assert is_shared(found.local) or not has_room()
    if (child := os.fork()) == 0:  # what a forked process makes is its own
        mine = pages.new_result((2**20,), torch.float32, torch.device("cpu"), rt.world)
        os._exit(is_shared(mine))
    assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    with runtime(backend="mpi") as rt:
        exchange_views(rt)
        memory(rt)
        checks = partial(move, longest=40), partial(matrices, widest=300), convolve
        for check in checks:
            cases.examples_of(rt, check, int(sys.argv[1]))
        assert pages.keep_freed_memory()
        write_straight(rt)
        pages.SHARED = 0  # small results, too
        for check in checks[:2]:
            cases.examples_of(rt, check, int(sys.argv[1]))
