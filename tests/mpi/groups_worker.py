"""Check the life of process groups on MPI: split, shrunk, made and ended often; long messages; invalid calls.

mpirun -np 2 python -m mpi4py tests/mpi/groups_worker.py result.json 2147483661    # tensors longer than 2^31
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from common.errors import UsageError
from common.launch.mpi_backend import register

WORLD = MPI.COMM_WORLD
N, RANK = WORLD.size, WORLD.rank


def make(ranks_per_host: int) -> Any:
    """Make a group of all ranks; ranks_per_host=0 keeps the real hosts."""
    os.environ["FIVED_RANKS_PER_HOST"] = str(ranks_per_host)
    g = dist.new_group(timeout=timedelta(seconds=300))
    os.environ.pop("FIVED_RANKS_PER_HOST")
    return g


@contextmanager
def group(ranks_per_host: int = 0) -> Iterator[Any]:
    g = make(ranks_per_host)
    yield g
    dist.destroy_process_group(g)


def raised(call: Callable[[], object]) -> str:
    """Return the text of the exception that `call` raises, or an empty string."""
    try:
        call()
    except (RuntimeError, ValueError, UsageError) as error:
        return str(error)
    return ""


def long_tensors(elements: int, ranks_per_host: int) -> dict[str, bool]:
    """Check some elements of a sum, a broadcast, a gather and a message, each of `elements` bytes."""
    found = {}
    x = torch.full((elements,), RANK + 1, dtype=torch.int8)
    x[-1] = 10 * (RANK + 1)

    def ends(t: torch.Tensor) -> list[int]:
        return [int(t[0]), int(t[elements // 2]), int(t[-2]), int(t[-1])]

    with group(ranks_per_host) as g:
        dist.all_reduce(x, group=g)
        total = N * (N + 1) // 2
        found["all_reduce"] = ends(x) == [total, total, total, 10 * total]
        x.fill_(RANK + 1)
        x[-1] = 10 * (RANK + 1)
        dist.broadcast(x, N - 1, group=g)
        found["broadcast"] = ends(x) == [N, N, N, 10 * N]
        x.fill_(RANK + 1)
        if RANK == 0:
            dist.send(x, 1, group=g)
        elif RANK == 1:
            dist.recv(x, 0, group=g)
            found["message"] = ends(x) == [1, 1, 1, 1]
        x.fill_(RANK + 1)
        parts = [x if r == RANK else torch.zeros_like(x) for r in range(N)]
        dist.all_gather(parts, x, group=g)
        found["all_gather"] = [ends(part) for part in parts] == [[r + 1] * 4 for r in range(N)]
    return found


def parts() -> dict[str, Any]:
    """Return the sum that each group made from another group gives, beside the right one."""
    ones = torch.ones(3)
    found: dict[str, Any] = {}
    with group() as g:
        half = sorted(r for r in range(N) if r % 2 == RANK % 2)
        split = g.split_group(half, group_name=f"half{RANK % 2}")
        x = ones * RANK
        split.allreduce([x]).wait()
        found["split"] = (x.tolist(), [float(sum(half))] * 3)
        found["split ranks"] = (split.size(), len(half))
        del split
    whole = make(ranks_per_host=1)
    x = ones * RANK
    if RANK == 0:
        found["excluded"] = raised(lambda: dist.shrink_group([0], whole))
        dist.destroy_process_group(whole)
    else:
        left = dist.shrink_group([0], whole)  # the others' `whole` is gone
        left.allreduce([x]).wait()
        found["shrink"] = (x.tolist(), [float(sum(range(1, N)))] * 3)
        under_way = left.allreduce([x]) if RANK == 1 else None
        left.abort()
        found["aborted"] = raised(lambda: (under_way or left.allreduce([x])).wait())
        dist.destroy_process_group(left)
    return found


def many_times(times: int) -> dict[str, Any]:
    """Check that groups leave no shared memory, communicators or threads behind when they end."""

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/shm/fived")

    def next_communicator() -> int:
        comm = WORLD.Dup()
        handle = comm.py2f()
        comm.Free()
        return handle

    def once(i: int) -> None:
        with group(ranks_per_host=i % 2) as g, group() as other:
            x, y = torch.ones(5), torch.ones(5)
            works = [
                dist.all_reduce(x, group=g, async_op=True),
                dist.all_reduce(y, group=other, async_op=True),
            ]
            for work in works:
                work.wait()

    once(0)
    once(1)
    before = (mappings(), next_communicator())
    for i in range(times):
        once(i)
    WORLD.Barrier()
    names = [p.name for p in Path("/dev/shm").glob(f"fived-{os.getpid()}-*")]
    return {"before": before, "after": (mappings(), next_communicator()), "in /dev/shm": names}


def refused() -> dict[str, str]:
    """Return the errors of invalid calls, each on its own group."""
    found = {}
    ones = torch.ones(4 + RANK)
    with group() as g:
        found["all_gather"] = raised(lambda: dist.all_gather([ones.clone() for _ in range(N)], ones, group=g))
    with group(ranks_per_host=1) as g:
        pieces = [ones.clone() for _ in range(N)]
        found["reduce_scatter"] = raised(lambda: dist.reduce_scatter(ones, pieces, group=g))
    with group(ranks_per_host=1) as g:
        splits = [1 + RANK] * N
        x = torch.ones(sum(splits))
        call = lambda: dist.all_to_all_single(torch.ones(sum(splits)), x, splits, splits, group=g)  # noqa: E731
        found["all_to_all"] = raised(call)
    for name, sent in {"shorter": 3, "longer": 5}.items():
        with group() as g:
            if RANK == 0:
                dist.send(torch.ones(sent), 1, group=g)
            elif RANK == 1:
                found[f"a {name} message"] = raised(lambda g=g: dist.recv(torch.ones(4), 0, group=g))
            WORLD.Barrier()
    with group() as g:
        backend = g._get_backend(torch.device("cpu"))
        found["meta"] = raised(lambda: backend.allreduce([torch.ones(4, device="meta")]))
    return found


def wrong_ranks() -> list[str]:
    """Return the errors of calls to ranks outside the world. In other groups torch itself looks ranks up."""
    x = torch.ones(3)
    calls: list[Callable[[int], object]] = [
        lambda r: dist.reduce(x, r),
        lambda r: dist.broadcast(x, r),
        lambda r: dist.gather(x, None, r),
        lambda r: dist.scatter(x, None, r),
        lambda r: dist.send(x, r),
        lambda r: dist.recv(x, r),
    ]
    return [raised(lambda r=r, call=call: call(r)) for call in calls for r in (-1, 9)]


def forked() -> tuple[str, list[float]]:
    """Return the error of a forked child that uses its parent's group, and the parents' next sum."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, raised(lambda: dist.all_reduce(torch.ones(3))).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    x = torch.ones(3)
    dist.all_reduce(x)
    return os.read(reader, 1000).decode(), x.tolist()


def without_room() -> str:
    """Return the error when /dev/shm is full; the limit on file sizes simulates this."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        return raised(lambda: make(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def main(result: str, elements: str) -> None:
    register()
    folder = WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else None)
    store = dist.FileStore(str(Path(folder, "store")), N)
    dist.init_process_group("fived", store=store, rank=RANK, world_size=N, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    found = {
        "long": {n: long_tensors(int(elements), n) for n in (0, 1)},
        "parts": parts(),
        "many": many_times(30),
        "refused": refused(),
        "wrong ranks": wrong_ranks(),
        "forked": forked(),
        "without room": without_room(),
    }
    dist.destroy_process_group()
    everything = WORLD.gather(found)
    if RANK == 0:
        Path(result).write_text(json.dumps(everything))


if __name__ == "__main__":
    main(*sys.argv[1:])
