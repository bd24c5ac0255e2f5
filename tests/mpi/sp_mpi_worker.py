"""Compute ring attention by sp_mpi on the first 1 to 4 ranks for each of a list of cases; rank 0 writes JSON.

python sp_mpi_worker.py RESULT CASES, under mpirun; a case is a dictionary of `attention`'s arguments.
"""

import json
import sys

import numpy as np
from mpi.said import said_by
from mpi.worker import on_comms, write

import sp_mpi


def drawn(shape, dtype):
    """Return the full q, k, v and gradient of the result, the same on every rank."""
    batch, heads, kv_heads, sequence, width = shape
    draw = np.random.default_rng(7)
    sizes = [(batch, h, sequence, width) for h in (heads, kv_heads, kv_heads, heads)]
    return [draw.standard_normal(size).astype(dtype) for size in sizes]


def attention(comm, shape, causal, order, dtype):
    batch, heads, kv_heads, sequence, width = shape
    mine = sp_mpi.positions(sequence, comm.size, comm.rank, order)
    q, k, v, dout = (np.ascontiguousarray(x[:, :, mine]) for x in drawn(shape, dtype))
    ring = sp_mpi.RingAttention(batch, heads, sequence, width, kv_heads, comm, causal, order, dtype)
    found, sent = {}, {}
    for _ in range(2):  # the second call meets used workspaces
        found["out"] = ring.forward(q, k, v)
        found["logsumexp"] = ring.logsumexp
        sent["forward"], formula = ring.bytes_sent, [ring.forward_bytes, ring.backward_bytes]
        found |= zip(("dq", "dk", "dv"), ring.backward(dout), strict=True)
        sent["backward"] = ring.bytes_sent
    return {
        "positions": comm.allgather(mine),
        "pairs": comm.allgather(sp_mpi.pairs(sequence, comm.size, comm.rank, order, causal)),
        "bytes": comm.allgather([sent["forward"], sent["backward"]]),
        "formula": comm.allgather(formula),
        "parts": {name: [x.tolist() for x in comm.allgather(part)] for name, part in found.items()},
    }


def refused(comm):
    """Return the module's errors for invalid tensors; every rank raises the same ones."""
    ring = sp_mpi.RingAttention(1, 2, 8 * comm.size, 4, comm=comm)
    right = np.ones((1, 2, 8, 4))
    calls = [
        lambda: ring.forward(right, right[:, :, :7].copy(), right),
        lambda: ring.forward(right, right.astype(np.float32), right),
        lambda: ring.forward(right, right[..., ::-1], right),
    ]
    return said_by(calls)


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    write(on_comms(lambda comm: {"cases": [attention(comm, **c) for c in cases], "refused": refused(comm)}))
