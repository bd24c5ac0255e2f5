"""The process group on MPI: gloo's results on random calls, calls that gloo lacks, errors that name ranks."""

import re

import pytest
from mpi.launch import need_module, run_worker

RANKS = [2, 3, 4]
HOSTS = ["2", "3+1"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run one mpirun for all numbers of ranks; return the worker's results."""
    need_module("fived_c10d")
    return run_worker(4, "backend_worker.py", tmp_path_factory.mktemp("backend"), "40")


@pytest.fixture(params=RANKS, ids="{0} ranks".format)
def results(request, found):
    """Return (ranks, the worker's results)."""
    return request.param, found[str(request.param)]


def test_random_calls_give_what_gloo_gives(results):
    assert results[1]["property"] == ""


def test_what_gloo_lacks(results):
    for setting, found in results[1]["beyond"].items():
        assert [name for name, right in found.items() if not right] == [], setting


def test_python_goes_on_while_a_small_all_reduce_waits(results):
    assert results[1]["interpreter is free"]


def test_calls_that_do_not_match_name_who_gave_what(results):
    ranks, found = results
    for setting in found["errors"]:
        for rank, errors in enumerate(found["errors"][setting]):
            other = 0 if rank else 1
            assert re.search(
                rf"all_reduce in group '.+', rank {rank} of {ranks}: this rank "
                rf"calls all_reduce of {4 + rank} Float .+; "
                rf"rank {other} calls all_reduce of {4 + other} Float",
                errors["sizes"],
            ), (setting, errors["sizes"])
            assert errors["after"] == errors["sizes"]  # the group stays broken, and says why
            assert "calls barrier" in errors["calls"]
            assert "calls all_reduce of 4 Float" in errors["calls"]
            assert "MAX on complex tensors" in errors["type"]


def test_ranks_that_do_not_come_are_named(results):
    """A timeout names late ranks of the same host by number, and of other hosts by the host's ranks."""
    ranks, found = results
    for setting, of_rank in found["errors"].items():
        per_host = ranks if setting == "one host" else int(setting[0])
        last_host = [r for r in range(ranks) if r // per_host == (ranks - 1) // per_host]
        for rank, errors in enumerate(of_rank[:-1]):
            late = f"rank(s) {ranks - 1}"
            if rank not in last_host:
                late = "the host of rank(s) " + ", ".join(map(str, last_host))
            for name in ("late", "late for little"):
                assert errors[name].endswith(f"timed out after 2000 ms; it waits for {late}"), (
                    setting,
                    errors,
                )
        assert "recv of 4 bytes, peer 1, tag 0" in of_rank[0]["recv"]
        assert "no match within 2000 ms" in of_rank[0]["recv"]


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """Run one mpirun for all numbers of hosts; return the worker's results."""
    need_module("fived_c10d")
    return run_worker(4, "peers_worker.py", tmp_path_factory.mktemp("peers"), *HOSTS)


@pytest.mark.parametrize("hosts", HOSTS)
def test_what_torch_builds_on_it_equals_one_device(hosts, peers):
    assert len(peers[hosts]) == sum(map(int, hosts.split("+")))
    for rank in peers[hosts]:
        assert len(rank) == 6
        for name, difference in rank.items():
            assert difference <= 1e-12, (name, difference)
