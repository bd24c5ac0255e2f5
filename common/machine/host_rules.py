"""Rules about the host of the GPUs: shared memory, limits, processors, networks.

The sizes are those that the NCCL documentation names for shared and locked memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.machine.facts import Host
from common.machine.rules import all_alike, rule
from common.machine.verdict import Line, of, passed, skipped


@rule()
def shared_memory(host: Host) -> Iterator[Line]:
    """Look at /dev/shm, through which ranks of a host send."""
    if host.shm is None:
        yield skipped("/dev/shm", "df gives no size")
        return
    needed = 2**30 if len(host.gpus) > 1 else 2**26
    found = f"{host.shm / 2**30:.2f} GiB, {(host.shm_free or 0) / 2**30:.2f} free"
    small = host.shm < needed or (host.shm_free or 0) < needed / 4
    cure = (
        "docker run --ipc=host, or --shm-size=8g" if host.container else "mount -o remount,size=8G /dev/shm"
    )
    if small or len(host.gpus) < 2:
        yield of(not small, "/dev/shm", found, cure)
    else:
        yield of(host.shm >= 8 * 2**30, "/dev/shm", found + ", 8 are safe for 8 ranks", cure, "warn")


@rule()
def limits(host: Host) -> Iterator[Line]:
    """Look at the limits of a process."""
    fast = bool(host.infiniband)
    if host.memlock is not None:
        enough = host.memlock == -1 or host.memlock >= 2**30 or not (fast or host.gpus)
        shown = "unlimited" if host.memlock == -1 else f"{host.memlock / 2**20:.0f} MiB"
        cure = "docker run --ulimit memlock=-1, or /etc/security/limits.conf"
        yield of(enough, "locked memory", shown, cure, "fail" if fast else "warn")
    if host.files is not None:
        cure = "ulimit -n 65536: each pair of ranks has sockets"
        yield of(host.files == -1 or host.files >= 1024, "open files", str(host.files), cure, "warn")
    if host.stack is not None:
        shown = "unlimited" if host.stack == -1 else f"{host.stack / 2**20:.0f} MiB"
        yield of(
            host.stack == -1 or host.stack >= 2**23,
            "stack",
            shown,
            "docker run --ulimit stack=67108864",
            "warn",
        )


@rule()
def container(host: Host) -> Iterator[Line]:
    """Say whether this is a container."""
    yield passed("container", "yes" if host.container else "no")


@rule()
def processors(host: Host) -> Iterator[Line]:
    """Look at the processors that feed the GPUs."""
    found = f"{host.cores} cores, {host.numa_nodes or 1} NUMA node(s)"
    if host.memory:
        found += f", {host.memory / 2**30:.0f} GiB memory"
    enough = host.cores >= 2 * max(1, len(host.gpus))
    yield of(enough, "processors", found, "give each rank two cores at least: one for its data", "warn")
    if not host.governors:
        yield skipped("CPU governor", "the system does not tell, as in many virtual machines")
    else:
        slow = host.governors - {"performance", "schedutil"}
        cure = "cpupower frequency-set -g performance"
        yield of(not slow, "CPU governor", ", ".join(sorted(host.governors)), cure, "warn")
    if host.gpus and -1 in host.gpu_nodes and host.numa_nodes > 1:
        cure = "the BIOS does not tell the GPUs' sockets: bind ranks by hand"
        yield Line("NUMA nodes of GPUs", "warn", "not reported", cure)


@rule()
def networks(host: Host) -> Iterator[Line]:
    """Look at network cards and InfiniBand ports."""
    up = {
        name: speed
        for name, speed in host.networks.items()
        if not name.startswith(("lo", "docker", "veth", "br-"))
    }
    shown = ", ".join(f"{name} {speed / 1000:g} Gbit/s" if speed > 0 else name for name, speed in up.items())
    yield passed("network", shown) if up else skipped("network", "no card is up")
    if not host.infiniband:
        yield skipped("InfiniBand", "no adapter")
        return
    bad = [f"{port}: {state}" for port, (state, _, _) in host.infiniband.items() if "ACTIVE" not in state]
    good = ", ".join(f"{port} {rate}" for port, (_, rate, _) in host.infiniband.items())
    cure = "ibstat; check cable and subnet manager; NCCL_IB_HCA names the ports to use"
    yield all_alike("InfiniBand", bad, good, cure, "fail" if len(bad) == len(host.infiniband) else "warn")
