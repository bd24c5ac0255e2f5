"""Check a machine: driver, GPUs, links, limits, networks, and whether they fit one another.

    python -m common.machine check
    python -m common.machine check --log gpu.log --json gpu.json
    python -m common.machine check --hosts node1 node2       # which of them can be reached from here
    NPROC=1 scripts/launch/torchrun.sh 2 node0:29500 common/machine/__main__.py check     # on each host: compare them

Each line passes, warns, fails, or says why it was skipped. The first line of the output is the verdict.
--record writes all answers of this machine to a file, and --answers checks such a file instead of this machine.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from common import comm
from common.comm import Group
from common.errors import UsageError
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.lesson.runner import run
from common.machine import gpu_rules, host_rules  # noqa: F401  they add their rules, GPUs first
from common.machine.facts import Host, read_host
from common.machine.rules import RULES
from common.machine.source import Source
from common.machine.tool import ToolOptions, finish
from common.machine.verdict import Line, of

SKEW = 1.0  # seconds between the clocks of two hosts


@dataclass
class CheckOptions(ToolOptions, without=("device", "backend")):
    """Options of the check."""

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Device of the messages between hosts."""
    gpus: Annotated[int, Within(0, 1024)] | None = None
    """GPUs that this machine must have."""
    hosts: tuple[str, ...] = ()
    """Names or addresses of hosts that must be reachable from here."""
    record: Path | None = None
    """File for all answers of this machine; of several hosts, the host's name is added."""
    answers: Path | None = None
    """File of --record to check instead of this machine."""


def checked(source: Source) -> tuple[Host, list[Line]]:
    """Return the facts and the lines of the machine that answers."""
    try:
        host = read_host(source)
        return host, [line for rule in RULES for line in rule(host)]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if source.live:
            raise
        raise UsageError(f"the recorded answers are damaged: {error!r}") from None


def reachable(names: Sequence[str], port: int = 29500) -> Line:
    """Return a line that names the unreachable hosts. A refused connection counts as reachable."""
    bad = []
    for name in names:
        try:
            socket.create_connection((name, port), timeout=5).close()
        except ConnectionRefusedError:
            pass
        except (OSError, UnicodeError) as error:
            bad.append(f"{name}: {getattr(error, 'strerror', '') or error}")
    cure = "check cable, address, route and firewall; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose the network"
    return of(not bad, "hosts reachable", "; ".join(bad) or ", ".join(names), cure)


def clock_ahead(group: Group, rank: int, tries: int = 9) -> float:
    """Return by how many seconds the clock of `rank` is ahead of this rank's.

    Of the fastest of `tries` round trips, in whose middle the other clock is taken to be read, as in NTP.
    """
    best, ahead = float("inf"), 0.0
    for _ in range(tries):
        comm.barrier(group)
        sent = time.time()
        there = comm.everyones(time.time(), group)[rank]
        back = time.time()
        if back - sent < best:
            best, ahead = back - sent, there - (sent + back) / 2
    return ahead


def compared(group: Group, host: Host) -> list[Line]:
    """Return the lines that compare hosts: versions, GPUs, clocks. All ranks call it, one per host."""
    hosts: list[Host] = comm.everyones(host, group)
    skews = [clock_ahead(group, rank) for rank in range(group.size)]
    lines = []
    for name, cure, facts in (
        ("version of the project", "git pull on all hosts, and make setup", [h.commit[:12] for h in hosts]),
        (
            "version of torch",
            "make setup on all hosts",
            [f"{h.torch}, CUDA {h.torch_cuda or 'none'}" for h in hosts],
        ),
        ("version of NCCL", "make setup on all hosts", [h.nccl or "none" for h in hosts]),
        ("driver", "install the same driver on all hosts", [h.driver or "none" for h in hosts]),
        ("GPUs", "give equal ranks equal GPUs", [", ".join(g.name for g in h.gpus) or "none" for h in hosts]),
    ):
        common = Counter(facts).most_common(1)[0][0]
        bad = [f"{h.name} has {fact}" for h, fact in zip(hosts, facts, strict=True) if fact != common]
        lines.append(
            of(
                not bad,
                f"same {name}",
                "; ".join(bad) + f", others {common}" if bad else common or "not reported",
                cure,
            )
        )
    bad = [f"{h.name} is {skew:+.1f} s off" for h, skew in zip(hosts, skews, strict=True) if abs(skew) > SKEW]
    found = "; ".join(bad) or f"within {max(map(abs, skews)):.3f} s"
    lines.append(of(not bad, "clocks", found, "start chrony or ntpd on all hosts"))
    return lines


def main(rt: Runtime, o: CheckOptions) -> bool:
    """Check this machine, or all hosts of the ranks; print the lines. False if one fails."""
    if rt.local_world_size > 1:
        raise UsageError("check runs one rank per host: NPROC=1, or --nproc_per_node=1")
    source = Source.of(o.answers) if o.answers else Source()
    host, lines = checked(source)
    if o.gpus is not None:
        found = sum(not gpu.lost for gpu in host.gpus)
        cure = "look for the missing ones on the PCI bus: lspci | grep -i nvidia; in a container: --gpus all"
        lines.insert(0, of(found == o.gpus, "number of GPUs", f"{found} of {o.gpus} answer", cure))
    if o.hosts:
        lines.insert(0, reachable(o.hosts))
    if o.record:
        several = rt.world_size > 1
        source.write(o.record.with_stem(f"{o.record.stem}-{host.name}") if several else o.record)
    if rt.world_size > 1:
        across = compared(rt.world, host)
        of_hosts = comm.everyones([replace(line, host=host.name) for line in lines], rt.world)
        lines = [*across, *(line for of_host in of_hosts for line in of_host)]
    title = host.name if rt.world_size == 1 else f"{rt.world_size} hosts"
    facts: dict[str, Any] = {"host": host.name, "driver": host.driver, "serials": [g.uuid for g in host.gpus]}
    return finish(rt, o, "check", lines, title, **facts)


def start() -> None:
    """Run the command line."""
    run(main, CheckOptions)
