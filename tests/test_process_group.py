"""The process group without Python; and MPI ends once and without errors, whichever rank leaves first."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi.launch import ROOT, mpirun, need_module

ENDINGS = ROOT / "build" / "tests" / "test_process_group"

# A receive that nobody answers, asked for by the progress thread until the interpreter is gone.
NEVER_DESTROYED = """
import ctypes
from mpi4py import MPI
import torch, torch.distributed as dist
from common.launch.mpi_backend import register
register()
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
dist.init_process_group("fived", store=dist.HashStore(), rank=rank, world_size=size)
work = dist.irecv(torch.zeros(4), (rank + 1) % size)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
"""


def ending(ranks, how=""):
    if not ENDINGS.exists():
        pytest.fail("build/tests/test_process_group is not built: run make setup", pytrace=False)
    return mpirun(ranks, ENDINGS, how)


@pytest.fixture
def segments():
    """Make two segments of shared memory; check that only the one of the dead process has been removed."""
    dead, living = (Path(f"/dev/shm/sm_segment.{name}-{os.getpid()}") for name in ("dead", "living"))
    dead.write_bytes(bytes(4096))
    living.write_bytes(bytes(4096))
    with living.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        file.close()
        yield
        left = dead.exists(), living.exists()
    living.unlink()
    dead.unlink(missing_ok=True)
    assert left == (False, True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_works_without_python(ranks, segments):
    done = ending(ranks)
    assert done.returncode == 0, done.stderr
    if sys.platform == "linux":
        libraries = subprocess.run(["ldd", ENDINGS], capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu" in libraries
        assert "libpython" not in libraries
        assert "libtorch_python" not in libraries


@pytest.mark.parametrize("how", ["outlives", "pending", "leaks"])
def test_groups_may_end_before_mpi_after_it_or_never(how):
    done = ending(2, how)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_that_dies_in_a_small_all_reduce_ends_all_ranks():
    assert ending(3, "dies").returncode != 0


def test_an_exception_ends_all_ranks():
    assert ending(3, "throws").returncode == 1


def test_python_may_leave_a_group_behind(segments):
    need_module("fived_c10d")
    done = mpirun(2, sys.executable, "-W", "ignore", "-c", NEVER_DESTROYED)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
