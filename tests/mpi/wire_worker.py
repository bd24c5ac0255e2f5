"""Bytes on the loopback of a network of our own, beside those in the ledger: every collective, every strategy.

    unshare --net sh -c "ip link set lo up && mpirun -np 4 python -m mpi4py tests/mpi/wire_worker.py result.json"

The messages of all ranks pass the one interface, and its counter grows by what they send, headers included. The
environment must keep Open MPI from shared memory, and make the ranks take one another for other hosts: test_wire.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from hybrid_training import HybridOptions, make_hybrid
from mpi.worker import WORLD, rest, write
from mpi4py import MPI

from common import comm
from common.comm import Group
from common.ledger import Ledger
from common.models.configs import CONFIGS, gpt2, mixtral
from common.runtime import Runtime, runtime
from common.training import Batches, whole_step

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


def calls(g: Group) -> dict[str, Callable[[], object]]:
    """Each function of common/comm.py that sends, by its name."""
    n, r = g.size, g.rank
    x, y, piece = torch.ones(LENGTH), torch.empty(LENGTH), torch.ones(LENGTH // n)
    sizes = [(r + j) % n * 60_000 for j in range(n)]  # to and from rank j
    uneven, room = torch.ones(sum(sizes)), torch.empty(sum(sizes))
    return {
        "all_reduce": lambda: comm.all_reduce(x, g),
        "broadcast": lambda: comm.broadcast(x, g, n - 1),
        "reduce": lambda: comm.reduce(x, g, 1),
        "all_gather": lambda: comm.all_gather(piece, g),
        "all_gather_into": lambda: comm.all_gather_into(y, piece, g),
        "reduce_scatter": lambda: comm.reduce_scatter(x, g),
        "reduce_scatter_into": lambda: comm.reduce_scatter_into(piece, x, g),
        "all_to_all": lambda: comm.all_to_all(x, g),
        "all_to_all_into": lambda: comm.all_to_all_into(room, uneven, g, sizes, sizes),
        "gather": lambda: comm.gather(x, g, 1),
        "scatter": lambda: comm.scatter([x] * n, y, g, 1),
        "send": lambda: comm.send(x, g, 1) if r == 0 else comm.recv(y, g, 0) if r == 1 else None,
        "exchange": lambda: comm.exchange(x, y, g, (r + 1) % n, (r - 1) % n),
        "shift": lambda: comm.shift(x, g),
    }


def two_steps(rt: Runtime, given: dict[str, Any]) -> Callable[[], object]:
    """Two steps of training: ZeRO-1 gathers nothing in the first."""
    o = HybridOptions(**{"model": "wire", "dp": 1, "batch": 8, "sequence": 64, "micro_batches": 1, **given})
    hybrid = make_hybrid(rt, o, o.mesh(rt))
    step = whole_step(hybrid.version(), Batches(o, hybrid.samples, rt.device), hybrid.tokens)
    return lambda: (step(), step())


def sent() -> int:
    """Bytes that the loopback has carried."""
    rest()
    return WORLD.bcast(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def measured(call: Callable[[], object]) -> tuple[int, float]:
    """Bytes on the wire and in the ledgers of all ranks. TCP sends twice what a loaded machine is late to confirm."""
    found = []
    for _ in range(3):
        start = sent()
        with Ledger() as ledger:
            call()
        found.append((sent() - start, WORLD.allreduce(float(ledger.bytes()))))
        if found[-1][0] < 1.03 * found[-1][1]:
            break
    return min(found)


def main(rt: Runtime) -> dict[str, tuple[int, float]]:
    """Of each collective on 2, 3 and 4 ranks and of each strategy on 4: the wire's bytes and the ledgers'."""
    found = {}
    for n in (2, 3, 4):
        g = Group("world", min(rt.rank, n - 1), n, tuple(range(n)), dist.new_group(list(range(n))))
        for name, call in calls(g).items():
            found[f"{name}, {n} ranks"] = measured(call if rt.rank < n else lambda: None)
    return found | {name: measured(two_steps(rt, given)) for name, given in STRATEGIES.items()}


if __name__ == "__main__":
    result = {}
    for backend in ("gloo", "mpi") if MPI.get_vendor()[0] == "Open MPI" else ():
        with runtime(backend=backend) as rt:
            result[backend] = main(rt)
    write(result)
