"""Runtime of a rank: rank, world size, device and backend, from any launcher.

    with runtime() as rt:
        x = torch.ones(3, device=rt.device)
        all_reduce(x, rt.world)

`launch.resolve` reads the environment; this module makes the process group, watches it and always ends it.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from common.comm import Group
from common.errors import UsageError
from common.launch import mpi_backend
from common.launch.launcher import Launch, resolve
from common.launch.program import check_output, leave_at_once, show_on_stderr
from common.launch.watchdog import RankFailed, Watchdog

BACKENDS = ("gloo", "nccl", "mpi")
MPI_LAUNCHERS = ("openmpi", "mpich")


@dataclass(frozen=True)
class Runtime:
    """Facts of one rank. `timeout` is in seconds; `world` is the group of all ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    device: torch.device
    backend: str
    timeout: float
    world: Group


def _choose(launch: Launch, device: str, backend: str) -> tuple[torch.device, str]:
    """Return device and backend: NCCL if each local rank has a GPU; MPI under mpirun on CPUs; else gloo."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend not in ("auto", *BACKENDS):
        raise UsageError(f"backend {backend!r} is unknown; choose one of auto, {', '.join(BACKENDS)}")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {device!r} is unknown; choose one of auto, cpu, cuda")
    if not gpus and (device == "cuda" or backend == "nccl"):
        asked = "device cuda" if device == "cuda" else "backend nccl"
        raise UsageError(
            f"{asked} needs a GPU, and torch {torch.__version__} sees none here; use --device cpu --backend gloo"
        )
    if backend == "nccl" and launch.local_world_size > gpus:
        raise UsageError(
            f"backend nccl needs a GPU for each rank: {launch.local_world_size} ranks on this host, {gpus} GPUs; "
            f"start {gpus} ranks, or use --backend gloo to share"
        )
    if device == "cpu" and backend == "nccl":
        raise UsageError("backend nccl moves GPU tensors only; use --device cuda, or --backend gloo")
    use_gpu = device == "cuda" or (device == "auto" and gpus > 0)
    by_mpi = launch.launcher in MPI_LAUNCHERS
    if backend == "mpi" and not by_mpi:
        raise UsageError(
            f"backend mpi moves tensors between ranks that mpirun started; here are {launch.world_size} ranks by "
            f"{launch.launcher}: use --backend {'nccl' if use_gpu else 'gloo'}"
        )
    if backend == "auto":
        backend = "nccl" if use_gpu and launch.local_world_size <= gpus else "gloo"
        if by_mpi and not use_gpu and mpi_backend.is_built():
            backend = "mpi"
        if use_gpu and backend == "gloo" and launch.local_rank == 0:
            print(
                f"{launch.local_world_size} ranks share {gpus} GPU(s): using gloo, not NCCL", file=sys.stderr
            )
    return torch.device("cuda", launch.local_rank % gpus) if use_gpu else torch.device("cpu"), backend


def _address(launch: Launch) -> tuple[str, int]:
    """Return host and port of rank 0's store; port 0: rank 0 picks a free one and sends it over MPI."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if launch.launcher == "slurm":
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "localhost")
        host = host or re.sub(r"\[(\w+).*", r"\1", nodes.split(",")[0])
        port = port or str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000)
    if (host is None or port is None) and launch.launcher == "torchrun":
        raise UsageError(
            "MASTER_ADDR and MASTER_PORT are needed beside RANK and WORLD_SIZE; torchrun sets them"
        )
    if host is None or port is None:
        return ("", 0)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"MASTER_PORT={port} is not a port; give a number from 1 to 65535, such as 29500")
    return host, int(port)


def _store(launch: Launch, timeout: float) -> dist.Store:
    """Return the store in which ranks find one another and report failures.

    A file if mpirun started all ranks on one host: it needs no port and outlives any rank. Its name is
    removed once all ranks have opened it, so that no file is left behind, however they end. Otherwise TCP,
    served by torchrun's agent or by rank 0.
    """
    if launch.world_size == 1:
        return dist.HashStore()
    host, port = _address(launch)
    wait, serve = timedelta(seconds=timeout), launch.rank == 0
    try:
        if not port:
            from mpi4py import MPI

            if launch.world_size == launch.local_world_size and sys.platform == "linux":
                handle, path = tempfile.mkstemp(prefix="ranks-") if serve else (-1, "")
                path = MPI.COMM_WORLD.bcast(path)
                handle = handle if serve else os.open(path, os.O_RDWR)  # never closed
                MPI.COMM_WORLD.Barrier()
                if serve:
                    os.unlink(path)
                return dist.FileStore(f"/proc/self/fd/{handle}", -1)
            if serve:
                store = dist.TCPStore("0.0.0.0", 0, None, True, wait, wait_for_workers=False)
            addresses, port = MPI.COMM_WORLD.bcast((_addresses(), store.port) if serve else None)
            host = MPI.COMM_WORLD.allgather(_that_answers(addresses, port))[launch.rank or -1]
            _toward(host, port)
            return store if serve else dist.TCPStore(host, port, None, False, wait, wait_for_workers=False)
        if launch.world_size > launch.local_world_size:
            _toward(host, port)
        serve = serve and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = dist.TCPStore(host, port, None, serve, wait, wait_for_workers=False)
        return dist.PrefixStore(f"run{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    except dist.DistNetworkError as error:
        if serve and "in use" in str(error):
            raise UsageError(
                f"port {port} on {host} is already in use; set MASTER_PORT to a free one, such as {_free_port()}"
            ) from None
        raise UsageError(
            f"rank {launch.rank} found no answer at {host}:{port} within {timeout:g} s: "
            f"is rank 0 started there, and is the port open?"
        ) from None


def _addresses() -> list[str]:
    """Return this host's name and the addresses of its networks."""
    interfaces = psutil.net_if_addrs().values()
    found = [a.address for all_of_one in interfaces for a in all_of_one if a.family == socket.AF_INET]
    return [socket.gethostname(), *(address for address in found if not address.startswith("127."))]


def _that_answers(addresses: list[str], port: int) -> str:
    """Return the first of rank 0's addresses at which its store answers: a host name may not resolve here."""
    for address in addresses:
        with suppress(OSError), socket.create_connection((address, port), 2.0):
            return address
    return addresses[0]


def _toward(host: str, port: int) -> None:
    """Make gloo use the network that leads to rank 0; by default it takes that of this host's own name."""
    with suppress(OSError):
        family, kind, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(there)  # finds the route, sends nothing
            here = s.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if here in {a.address for a in addresses} and not here.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _check_interfaces(backend: str) -> None:
    """Check that this host has the networks that the user names to gloo. Raises UsageError."""
    given, there = os.environ.get("GLOO_SOCKET_IFNAME", ""), psutil.net_if_addrs()
    if backend == "gloo" and (unknown := [name for name in given.split(",") if name and name not in there]):
        raise UsageError(
            f"GLOO_SOCKET_IFNAME={given}: this host has no network {unknown[0]!r}; it has {', '.join(there)}"
        )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


@contextmanager
def session(
    launch: Launch,
    store: dist.Store,
    device: str,
    backend: str,
    timeout: float,
    show: Callable[[str], None] = show_on_stderr,
) -> Iterator[Runtime]:
    """Yield the Runtime over `store`; always end its process group. If a rank fails, all raise RankFailed."""
    watchdog = Watchdog(store, launch.rank, launch.world_size, show)
    try:
        check_output()
        chosen, backend = _choose(launch, device, backend)
        if launch.local_world_size > 1:
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        if launch.world_size == launch.local_world_size and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names of laptops often lead nowhere
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        watchdog.meet(timeout)
        _check_interfaces(backend)
        if backend == "mpi":
            mpi_backend.register()
        dist.init_process_group(
            mpi_backend.NAME if backend == "mpi" else backend,
            store=dist.PrefixStore("pg", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(seconds=timeout),
        )
        pg = dist.group.WORLD if launch.world_size > 1 else None
        world = Group("world", launch.rank, launch.world_size, tuple(range(launch.world_size)), pg)
        local = (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
        yield Runtime(*local, launch.launcher, chosen, backend, timeout, world)
        sys.stdout.flush()  # a failure here can still be reported
        watchdog.finish(timeout)
    except BaseException as error:
        if launch.world_size > 1:
            raise watchdog.failed(error) from error
        raise
    finally:
        if dist.is_initialized() and not watchdog.someone_failed:
            dist.destroy_process_group()


@contextmanager
def runtime(device: str = "auto", backend: str = "auto", timeout: float = 60.0) -> Iterator[Runtime]:
    """Join the world that the launcher started; leave it with the process group destroyed.

    device: auto, cpu, cuda. backend: auto, gloo, nccl, mpi. timeout: seconds, the longest any wait may last.
    With several ranks a failure ends the process here, after the first failing rank has shown why: a rank
    that lingers would hold up the others. Exit code 2 for bad input, 1 for anything else.
    """
    launch = resolve()
    store = _store(launch, timeout)
    try:
        with session(launch, store, device, backend, timeout) as rt:
            yield rt
    except RankFailed as failure:
        leave_at_once(failure.code)
