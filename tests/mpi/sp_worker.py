"""Compute attention under one mpirun, over our process group; write differences from one device as JSON.

mpirun -np 4 python -m mpi4py tests/mpi/sp_worker.py result.json
"""

from __future__ import annotations

from functools import partial

import torch
from mpi.worker import write

from common import comm
from common.launch.runtime import Runtime, runtime
from common.models.transformer import attend

from sp_hybrid import grid, hybrid_attention
from sp_sequence_parallel import ORDERS, attends
from sp_split import places
from sp_training import sp_group


def differences(rt: Runtime) -> dict[str, float]:
    """Return the ranks' largest relative difference of o, dq, dk, dv: 4 heads, 2 kv heads, 32 tokens."""
    draw, group = torch.Generator().manual_seed(1), sp_group(rt)
    *qkv, do = (torch.randn(2, heads, 32, 6, generator=draw, dtype=torch.float64) for heads in (4, 2, 2, 4))
    whole = [x.clone().requires_grad_() for x in qkv]
    expected = attend(*whole, True)
    expected.backward(do)
    row, column = grid(group, 2)
    cases = {
        name: (call, places(32, group, ORDERS[name])) for name, call in attends(group, "library").items()
    }
    for order in ("contiguous", "zigzag"):
        cases["hybrid, " + order] = (
            partial(hybrid_attention, row=row, column=column, order=order),
            places(32, column, order, row),
        )
    found = {}
    for name, (call, mine) in cases.items():
        part = [x[:, :, mine].requires_grad_() for x in qkv]
        o = call(*part, True)
        o.backward(do[:, :, mine])
        pairs = zip((o, *(x.grad for x in part)), (expected, *(x.grad for x in whole)), strict=True)
        worst = torch.stack([(a - b[:, :, mine]).abs().max() / b.abs().max() for a, b in pairs]).max()
        comm.all_reduce(worst, group, "max")
        found[name] = worst.item()
    return found


if __name__ == "__main__":
    with runtime() as rt:
        write({"backend": rt.backend, "differences": differences(rt)})
