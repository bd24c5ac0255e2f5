"""The machine kit on two hosts: networks of one machine, as in two_hosts.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_hosts import Host, NotAllowed, two_hosts

ROOT = Path(__file__).resolve().parents[1]
PORT = "29511"


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as both:
            yield both
    except (NotAllowed, FileNotFoundError) as error:
        pytest.skip(f"no networks can be made here: {error}")


def both(
    hosts: tuple[Host, Host], words: tuple[str, ...], per_host: int = 1, **second: str
) -> list[tuple[int, str]]:
    """Run a tool on both hosts, so many ranks on each; return exit code and output of every rank.

    second: variables of the second host's environment.
    """
    running: list[subprocess.Popen[str]] = []
    for place, host in enumerate(hosts):
        for local in range(per_host):
            rank = place * per_host + local
            variables = {
                "RANK": rank,
                "WORLD_SIZE": 2 * per_host,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": per_host,
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "veth0",
                "OMP_NUM_THREADS": 1,
            } | (second if place else {})
            env = [f"{name}={value}" for name, value in variables.items()]
            running.append(host.start("env", *env, sys.executable, "-m", "common.machine", *words))
    return [
        (0, "") if p is None else (p.wait(timeout=240), p.stdout.read() if p.stdout else "") for p in running
    ]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_equal_hosts_pass(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    (code, said), (other, _) = both(hosts, ("check", "--json", str(tmp_path / "x")))
    assert (code, other) == (0, 0), said
    lines = json.loads((tmp_path / "x").read_text().splitlines()[0])["lines"]
    assert {line["host"] for line in lines} == {"", "node0", "node1"}
    assert [line["name"] for line in lines if line["status"] == "fail"] == []


def test_another_version_and_a_wrong_clock_are_named(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["git", "init", "-q", str(other)], check=True)
    name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", "-C", str(other), *name, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nright = time.time\ntime.time = lambda: right() + 100\n"
    )
    second = {"GIT_DIR": str(other / ".git"), "PYTHONPATH": str(tmp_path)}
    outputs = ("--json", str(tmp_path / "x"))
    (code, said), (also, _) = both(hosts, ("check", *outputs), **second)
    assert (code, also) == (1, 1), said
    record = json.loads((tmp_path / "x").read_text().splitlines()[0])
    found = {line["name"]: line["found"] for line in record["lines"] if line["status"] == "fail"}
    assert "has" in found["same version of the project"]
    assert "node1 is +100.0 s off" in found["clocks"]
    assert record["verdict"].startswith("FAIL: same version of the project: node")


def test_communication_across_hosts(hosts: tuple[Host, Host]) -> None:
    found = both(hosts, ("communication", "--sizes-mb", "0.1", "--calls", "20"), per_host=2)
    assert [code for code, _ in found] == [0] * 4, found
    assert "4 ranks, gloo, cpu" in found[0][1]


def test_a_host_that_cannot_be_reached_is_named(hosts: tuple[Host, Host]) -> None:
    words = ("-m", "common.machine", "check", "--hosts", *(host.address for host in hosts))
    process = hosts[0].start(sys.executable, *words)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    hosts[0].network("link set veth0 down")
    process = hosts[0].start(sys.executable, *words)
    said = process.communicate(timeout=240)[0]
    hosts[0].network("link set veth0 up")
    assert process.returncode == 1
    assert said.startswith(f"FAIL: hosts reachable: {hosts[1].address}: ")
