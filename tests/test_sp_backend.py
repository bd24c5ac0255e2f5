"""Every attention on 4 ranks of one mpirun, over the process group on MPI."""

from __future__ import annotations

from pathlib import Path

from mpi.launch import need_module, run_worker


def test_equal_to_one_device(tmp_path: Path) -> None:
    need_module("fived_c10d")
    found = run_worker(4, "sp_worker.py", tmp_path)
    assert found["backend"] == "mpi"
    assert len(found["differences"]) == 6
    assert max(found["differences"].values()) <= 1e-12, found
