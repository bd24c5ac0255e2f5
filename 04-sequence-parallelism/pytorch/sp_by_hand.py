"""Ring attention in small integers: each rank has two of four tokens, and keys and values go round the ring.

    o_i = sum over j <= i of 2^(q_i k_j) v_j  /  sum over j <= i of 2^(q_i k_j)          softmax to the base 2

A block of keys adds to the numerator and to the denominator, so blocks can come one after the other:

    numerator   += sum over the block of 2^(q_i k_j) v_j          denominator += sum over the block of 2^(q_i k_j)

Backward, with p_ij the weights and o_i do_i their mean gradient, in units of ln 2:

    dv_j = sum over i of p_ij do_i          dk_j = sum over i of p_ij (v_j - o_i) do_i q_i

Rank 1's queries contribute to dk and dv of rank 0's keys, so those contributions travel back to rank 0. Rank 0's
queries see no key of rank 1. One head of width 1; q, k and v are chosen so that the results are integers.

    python sp_by_hand.py --nproc 2     torchrun --nproc_per_node=2 sp_by_hand.py     mpirun -np 2 python sp_by_hand.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from common import comm
from common.launch.runtime import Runtime
from common.lesson.by_hand import ByHandOptions, need_two_ranks, verdict
from common.lesson.runner import console, run
from common.utils.ranks import table_of_ranks

Q = torch.tensor([1.0, 1, 1, 1])
K = torch.tensor([0.0, 0, 1, 2])
V = torch.tensor([8.0, 0, 16, 24])
DO = torch.tensor([8.0, 8, 8, 8])


def weights(at: Tensor, k: Tensor, at_keys: Tensor) -> Tensor:
    """Return 2^(q_i k_j) of the queries at places `at`, and 0 for keys that come after them."""
    return torch.exp2(Q[at, None] * k).where(at_keys <= at[:, None], 0)


def gradients(at: Tensor, p: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """Return what the queries at places `at`, with weights p, contribute to (dk, dv) of the keys."""
    dk = (p * (v - o[:, None]) * DO[at, None] * Q[at, None]).sum(0)
    return torch.stack([dk, (p * DO[at, None]).sum(0)])


def main(rt: Runtime, o: ByHandOptions) -> bool:
    """Attend to each block of keys in turn, forward and backward, compare with one device."""
    need_two_ranks(rt)
    mine, theirs = torch.arange(2) + 2 * rt.rank, torch.arange(2) + 2 * (1 - rt.rank)
    kv = torch.stack([K[mine], V[mine]])
    blocks = [(mine, kv), (theirs, comm.shift(kv, rt.world))]  # the other rank's keys and values arrive
    parts = [weights(mine, k, keys) for keys, (k, _) in blocks]
    own, other = (torch.stack([w @ v, w.sum(1)], 1) for w, (_, (_, v)) in zip(parts, blocks, strict=True))
    numerator, total = (own + other).unbind(1)
    out = numerator / total
    shown = {"tokens": mine, "own block": own, "other block": other, "o": out}
    console(rt).print(table_of_ranks("sp: numerator, denominator, result", rt.world, rows(shown)))

    here, away = (
        gradients(mine, w / total[:, None], v, out) for w, (_, (_, v)) in zip(parts, blocks, strict=True)
    )
    home = comm.shift(away, rt.world)  # contributions of the other rank's queries
    summed = here + home
    shown = {"tokens": mine, "dk, dv, own": here.T, "sent home": away.T, "received": home.T}
    shown["dk, dv, summed"] = summed.T
    console(rt).print(table_of_ranks("sp: gradients of keys and values", rt.world, rows(shown)))

    every = torch.arange(4)
    w = weights(every, K, every)
    whole = w @ V / w.sum(1)
    right = gradients(every, w / w.sum(1)[:, None], V, whole)
    return verdict(rt, [(out, whole[mine]), (summed, right[:, mine])])


def rows(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns with a row per token."""
    return {name: x.reshape(2, -1) for name, x in columns.items()}


if __name__ == "__main__":
    run(main, ByHandOptions)
