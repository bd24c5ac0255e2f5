"""Choosing a mesh for a model and a machine.

A job has to train on `p.gpus` GPUs, `p.host` of them in each host. Choose the ranks along pp, dp and tp and the number
m of micro-batches of each dp rank, such that a step fits in memory and takes as little time as possible.

A mesh is allowed if pp · dp · tp = gpus, tp divides p.heads and is at most p.host, pp divides p.layers, and dp · m
divides the batch p.batch (in samples). With Ψ = 12 · layers · width² parameters, and b = batch / (dp · m) samples in a
micro-batch:

    memory of a rank in bytes (16 bits, ZeRO-1):
        Ψ / (pp tp) · (4 + 12 / dp)                                   weights, gradients, states
      + min(pp, m) · b · sequence · width · 34 / tp · layers / pp     activations of the micro-batches in flight

    time of a step in seconds:
        work    6 Ψ · batch · sequence / (gpus · rate)                rate in FLOP/s of a GPU
        tp      4 layers / pp · 2 (tp - 1) / tp · (2 · batch / dp · sequence · width) / inside
                                                                      inside: bytes/s within a host
        dp      2 (dp - 1) / dp · (2 Ψ / (pp tp)) / between           between: bytes/s between hosts
        step    (work + tp) · (1 + (pp - 1) / m) + dp

Write the two formulas and the search. `p` has the fields gpus, host, layers, width, heads, batch, sequence, memory
(bytes of a GPU), rate, inside and between. A mesh is the tuple (pp, dp, tp, m).

Targets: both formulas; on 20 jobs an allowed mesh that fits and takes at most 1.1 times the time of the best one; None
where no mesh fits.
"""

from typing import Any

Plan = tuple[int, int, int, int]  # pp, dp, tp, m


def memory(p: Any, plan: Plan) -> float:
    """Return the bytes that a rank needs."""
    raise NotImplementedError(
        "write the formula of the memory; then that of the time; then try all allowed meshes"
    )


def seconds(p: Any, plan: Plan) -> float:
    """Return the time of a step in seconds."""
    raise NotImplementedError("work, tp and dp first; the bubble multiplies the first two")


def choose(p: Any) -> Plan | None:
    """Return the fastest mesh that is allowed and fits; None if there is none."""
    raise NotImplementedError("list the divisors of the GPUs for tp and pp; what is left is dp")
