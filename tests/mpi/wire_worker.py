"""Count the bytes on the loopback of a private network, beside the ledger's: every collective and strategy.

    unshare --net sh -c "ip link set lo up && mpirun -np 4 python -m mpi4py tests/mpi/wire_worker.py result.json"

The messages of all ranks pass this one interface, whose counter grows by the bytes sent, headers included.
The environment must keep Open MPI from shared memory, and let each rank look like a host: see test_wire.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from mpi.worker import WORLD, rest, write
from mpi4py import MPI

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger
from common.launch.runtime import Runtime, runtime
from common.lesson.training import timed_adamw
from common.models.configs import CONFIGS, gpt2, mixtral

import dp_libtorch
from hybrid_layout import HybridOptions
from hybrid_training import make_job, train

CONFIGS["wire"] = gpt2(layers=4, width=64, heads=4, sequence=64)
CONFIGS["wire-experts"] = mixtral(
    layers=4, width=64, heads=4, kv_heads=4, mlp_width=64, sequence=64, experts=4
)

LENGTH = 12 * 20_000  # divides by 2, 3 and 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "dp": dict(dp=4),
    "ZeRO-1": dict(dp=4, zero=1),
    "ZeRO-2": dict(dp=4, zero=2),
    "ZeRO-3": dict(dp=4, zero=3),
    "pp": dict(pp=4),
    "tp": dict(tp=4),
    "tp, sequence parallel": dict(tp=4, sequence_parallel=True),
    "sp, ring": dict(sp=4, attention="ring"),
    "sp, Ulysses": dict(sp=4, attention="ulysses"),
    "sp, all-gather": dict(sp=4, attention="allgather"),
    "ep": dict(ep=4, model="wire-experts"),
}


IN_LIBTORCH = {"dp in C++": dp_libtorch.DataParallel, "ZeRO-1 in C++": dp_libtorch.Zero1}


def calls(g: Group) -> dict[str, Callable[[], object]]:
    """Return each function of common/comm/calls.py that sends, by its name."""
    n, r = g.size, g.rank
    x, y, piece = torch.ones(LENGTH), torch.empty(LENGTH), torch.ones(LENGTH // n)
    sizes = [(r + j) % n * 60_000 for j in range(n)]  # to and from rank j
    uneven, room = torch.ones(sum(sizes)), torch.empty(sum(sizes))
    gaps = [torch.ones(max(sizes) // 50, 60)[: size // 50, :50] for size in sizes]
    return {
        "all_reduce": lambda: comm.all_reduce(x, g),
        "broadcast": lambda: comm.broadcast(x, g, n - 1),
        "reduce": lambda: comm.reduce(x, g, 1),
        "all_gather": lambda: comm.all_gather(piece, g),
        "all_gather_into": lambda: comm.all_gather_into(y, piece, g),
        "reduce_scatter": lambda: comm.reduce_scatter(x, g),
        "reduce_scatter_into": lambda: comm.reduce_scatter_into(piece, x, g),
        "all_to_all": lambda: comm.all_to_all(x, g),
        "all_to_all_views": lambda: comm.all_to_all_views([torch.empty_like(x) for x in gaps], gaps, g),
        "all_to_all_into": lambda: comm.all_to_all_into(room, uneven, g, sizes, sizes),
        "send": lambda: comm.send(x, g, 1) if r == 0 else comm.recv(y, g, 0) if r == 1 else None,
        "exchange": lambda: comm.exchange(x, y, g, (r + 1) % n, (r - 1) % n),
        "shift": lambda: comm.shift(x, g),
    }


def two_steps(rt: Runtime, given: dict[str, Any]) -> Callable[[], object]:
    """Return a call that trains two steps, after one that makes the groups and in which ZeRO-1 gathers nothing."""
    o = HybridOptions(**{"model": "wire", "dp": 1, "batch": 8, "sequence": 64, "micro_batches": 1, **given})
    run = train(make_job(rt, o, o.mesh(rt), timed_adamw))
    next(run)
    return lambda: (next(run), next(run))


def step_in_libtorch(rt: Runtime, kind: Any) -> tuple[Callable[[], object], Callable[[], float]]:
    """Return a call that sums the gradients of weights in C++, and a count of the bytes that this rank booked."""
    weights = [torch.ones(LENGTH // 4, requires_grad=True) for _ in range(4)]
    made = kind(weights, rt.world.pg)

    def step() -> None:
        torch.stack([w.square().sum() for w in weights]).sum().backward()
        made.finish()
        if kind is dp_libtorch.Zero1:
            made.gather()

    def booked() -> float:
        return sum(n_bytes for _, n_bytes, _ in made.take_messages()) / rt.world_size

    booked()  # the broadcast of the weights
    return step, booked


def sent() -> int:
    """Return the bytes that the loopback has carried so far."""
    rest()
    return WORLD.bcast(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def measured(call: Callable[[], object], booked: Callable[[], float] | None = None) -> tuple[int, float]:
    """Return the bytes on the wire and in the ledgers of all ranks, or those that `booked` returns.

    They are the smallest of up to three tries, since TCP resends on a loaded machine.
    """
    found = []
    for _ in range(3):
        start = sent()
        with Ledger() as ledger:
            call()
        here = booked() if booked else float(ledger.bytes())
        found.append((sent() - start, WORLD.allreduce(here)))
        if found[-1][0] < 1.03 * found[-1][1]:
            break
    return min(found)


def main(rt: Runtime) -> dict[str, tuple[int, float]]:
    """Return bytes on the wire and in the ledgers: collectives on 2, 3 and 4 ranks, strategies on 4."""
    found = {}
    for n in (2, 3, 4):
        g = Group("world", min(rt.rank, n - 1), n, tuple(range(n)), dist.new_group(list(range(n))))
        for name, call in calls(g).items():
            found[f"{name}, {n} ranks"] = measured(call if rt.rank < n else lambda: None)
    found |= {name: measured(*step_in_libtorch(rt, kind)) for name, kind in IN_LIBTORCH.items()}
    return found | {name: measured(two_steps(rt, given)) for name, given in STRATEGIES.items()}


if __name__ == "__main__":
    result = {}
    for backend in ("gloo", "mpi") if MPI.get_vendor()[0] == "Open MPI" else ():
        with runtime(backend=backend) as rt:
            result[backend] = main(rt)
    write(result)
