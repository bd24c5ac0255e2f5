"""The life of process groups on MPI: split, shrunk, made and ended many times; and the ends of a run."""

import re
import sys

import pytest
from mpi.launch import mpirun, need_module, run_worker

RANKS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return each rank's results; MPI carries 1000 bytes in a message, while tensors have 5013."""
    need_module("fived_c10d")
    folder = tmp_path_factory.mktemp("groups")
    return run_worker(
        RANKS, "groups_worker.py", folder, "5013", environment={"FIVED_LARGEST_MESSAGE": "1000"}
    )


def test_tensors_longer_than_one_message(found):
    for mine in found:
        for hosts, results in mine["long"].items():
            assert all(results.values()), (hosts, results)


def test_groups_out_of_groups(found):
    for rank, mine in enumerate(found):
        parts = mine["parts"]
        assert parts["split"][0] == parts["split"][1]
        assert parts["split ranks"][0] == parts["split ranks"][1]
        if rank == 0:
            assert "rank 0 is in the exclusion list" in parts["excluded"]
        else:
            assert parts["shrink"][0] == parts["shrink"][1]
            assert "without 0' was aborted" in parts["aborted"]


def test_nothing_is_left_of_groups_that_ended(found):
    for mine in found:
        assert mine["many"]["after"] == mine["many"]["before"]
        assert mine["many"]["in /dev/shm"] == []


def test_calls_that_cannot_be_right_name_who_gave_what(found):
    for rank, mine in enumerate(found):
        refused, other = mine["refused"], 0 if rank else 1
        for call in ("all_gather", "reduce_scatter"):
            assert f"rank {rank} of {RANKS}: this rank calls {call} of {4 + rank} Float" in refused[call]
            assert f"rank {other} calls {call} of {4 + other} Float" in refused[call]
        assert "all_to_all in group" in refused["all_to_all"]
        assert "rank 0 sends 4 bytes to rank 1, which expects 8" in refused["all_to_all"]
        assert "a tensor on meta" in refused["meta"]
    assert "recv of 16 bytes, peer 0" in found[1]["refused"]["a shorter message"]
    assert "12 elements arrived from rank 0, 16 expected" in found[1]["refused"]["a shorter message"]
    assert "elements arrived from rank 0, 16 expected" in found[1]["refused"]["a longer message"]


def test_ranks_that_there_are_not_are_refused(found):
    for mine in found:
        for place, said in enumerate(mine["wrong ranks"]):
            assert f"there is no rank {9 if place % 2 else -1}; there are 0 to {RANKS - 1}" in said, said


def test_a_forked_child_is_refused_and_changes_nothing(found):
    for mine in found:
        said, total = mine["forked"]
        assert said.startswith("this process was forked from a rank of MPI")
        assert total == [RANKS] * 3


def test_a_host_without_room_for_shared_memory(found):
    for mine in found:
        assert re.fullmatch(
            r"/dev/shm has no room for \d+ bytes, which 3 ranks of one host share: File too large; "
            r"give it more \(docker run --shm-size=1g\), or use --backend gloo",
            mine["without room"],
        ), mine["without room"]


START = """
import os, sys
import torch, torch.distributed as dist
from datetime import timedelta
from mpi4py import MPI
from common.launch.mpi_backend import register
register()
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
store = dist.FileStore(sys.argv[1], size)
dist.init_process_group("fived", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [size] * 3
"""


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        pytest.param(
            "work = dist.all_reduce(x, async_op=True) if rank == 0 else dist.irecv(x, 0, tag=7)",
            0,
            "",
            id="calls under way",
        ),
        pytest.param(
            "work = dist.irecv(x, 1 - rank)\n"
            "MPI.Finalize()\n"
            "try:\n    work.wait()\n"
            "except RuntimeError as error:\n    print(error)\n"
            "try:\n    dist.all_reduce(x)\n"
            "except RuntimeError as error:\n    print(error)\n"
            "dist.destroy_process_group()",
            0,
            "MPI has ended",
            id="MPI ended first",
        ),
        pytest.param(
            "dist.all_reduce(torch.ones(3 + rank))",
            1,
            "rank 1 calls all_reduce of 4 Float",
            id="an exception",
        ),
        pytest.param("dist.barrier() if rank == 0 else os._exit(3)", 3, "", id="a rank gone"),
    ],
)
def test_a_run_ends_whatever_the_order(end, code, says, tmp_path):
    need_module("fived_c10d")
    done = mpirun(2, sys.executable, "-m", "mpi4py", "-c", START + end, tmp_path / "store")
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    if code == 0:
        assert "MPI_ABORT" not in done.stderr


def test_debug_mode_of_torch(tmp_path):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL checks each call over gloo first, and refuses mismatched ones."""
    need_module("fived_c10d")
    call = (
        "try:\n    dist.all_reduce(torch.ones(3 + rank))\n"
        "except RuntimeError as error:\n    print('refused', str(error)[:300])\n"
        "dist.destroy_process_group()"
    )
    done = mpirun(
        2,
        *(sys.executable, "-m", "mpi4py", "-c", START + call, tmp_path / "store"),
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Detected mismatch between collectives on ranks") == 2, done.stdout
