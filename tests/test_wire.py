"""The ledger's bytes are the wire's: on a private network, the ranks' messages are the only traffic."""

from __future__ import annotations

import inspect

import pytest
from mpi.launch import cannot, need_module, run_worker
from two_hosts import NotAllowed, own_network

from common import comm

# 4 ranks of one machine as of four hosts, by TCP
FOUR_HOSTS = {
    "FIVED_RANKS_PER_HOST": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, float]]]:
    need_module("fived_c10d")
    try:
        before = own_network()
    except (NotAllowed, FileNotFoundError) as error:
        cannot(f"no networks can be made here: {error}")
    folder = tmp_path_factory.mktemp("wire")
    measured = run_worker(4, "wire_worker.py", folder, environment=FOUR_HOSTS, before=before)
    return measured or pytest.skip("only Open MPI is known to keep to TCP when told to")


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_wire_carries_what_the_ledger_books(
    backend: str, found: dict[str, dict[str, tuple[int, float]]]
) -> None:
    """The wire carries at most 3 % more than the ledger: headers, confirmations, MPI's agreement on calls."""
    of_backend = found[backend]
    assert {
        case: wire / booked for case, (wire, booked) in of_backend.items() if not 1 <= wire / booked < 1.03
    } == {}
    functions = {
        name
        for name, function in inspect.getmembers(comm, inspect.isfunction)
        if function.__module__ == comm.calls.__name__ and "group" in inspect.signature(function).parameters
    }
    silent = {"everyones", "barrier", "recv"}
    measured = {case.split(",")[0] for case in of_backend if case.endswith(" ranks")}
    assert {name for name in functions - silent if not name.startswith("_")} == measured
