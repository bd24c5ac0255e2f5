"""The process group on MPI: gloo's results on random calls, what gloo lacks, and errors that name the ranks."""

import re

import pytest
from mpi.launch import need_module, run_worker

RANKS = [2, 3, 4]


@pytest.fixture(scope="module", params=RANKS, ids="{0} ranks".format)
def results(request, tmp_path_factory):
    """One mpirun for each number of ranks: (ranks, what the worker found)."""
    need_module("fived_c10d")
    folder = tmp_path_factory.mktemp("backend")
    return request.param, run_worker(request.param, "backend_worker.py", folder, "40")


def test_random_calls_give_what_gloo_gives(results):
    assert results[1]["property"] == ""


def test_what_gloo_lacks(results):
    assert all(results[1]["beyond"].values()), results[1]["beyond"]


def test_calls_that_do_not_match_name_who_gave_what(results):
    ranks, found = results
    for rank, errors in enumerate(found["errors"]):
        other = 0 if rank else 1
        assert re.search(
            rf"all_reduce in group '.+', rank {rank} of {ranks}: this rank calls all_reduce of {4 + rank} Float .+; "
            rf"rank {other} calls all_reduce of {4 + other} Float",
            errors["sizes"],
        ), errors["sizes"]
        assert errors["after"] == errors["sizes"]  # the group stays broken, and says why
        assert "calls barrier" in errors["calls"]
        assert "calls all_reduce of 4 Float" in errors["calls"]
        assert "MAX on complex tensors" in errors["type"]


def test_ranks_that_do_not_come_are_named(results):
    ranks, found = results
    for errors in found["errors"][:-1]:
        assert f"timed out after 2000 ms; it waits for rank(s) {ranks - 1}" in errors["late"]
    assert "recv of 4 bytes, peer 1, tag 0" in found["errors"][0]["recv"]
    assert "no match within 2" in found["errors"][0]["recv"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_torch_builds_on_it_equals_one_device(ranks, tmp_path):
    need_module("fived_c10d")
    for name, difference in run_worker(ranks, "peers_worker.py", tmp_path).items():
        assert difference <= 1e-12, (name, difference)
