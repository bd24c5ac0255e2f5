"""Pipeline parallelism in small integers: rank 0 has A, rank 1 has B, and four tokens pass in two micro-batches.

    rank 0   g = relu(x A) ── g ──►                    ◄── dg ── dh = dg where h > 0, dA += x^T dh
    rank 1                    y = g B, dy, dB += g^T dy, dg = dy B^T

The model is common/models/by_hand.py. A micro-batch of two tokens sends g forward and dg back, four numbers each.

    python pp_by_hand.py --nproc 2     torchrun --nproc_per_node=2 pp_by_hand.py     mpirun -np 2 python pp_by_hand.py
"""

from __future__ import annotations

import torch

from common import comm
from common.launch.runtime import Runtime
from common.lesson.by_hand import ByHandOptions, need_two_ranks, verdict
from common.lesson.runner import console, run
from common.models.by_hand import A_DF, B_FD, TARGET_TD, X_TD, one_device
from common.utils.ranks import table_of_ranks


def main(rt: Runtime, o: ByHandOptions) -> bool:
    """Pass both micro-batches forward and back, accumulate each stage's gradient, compare with one device."""
    need_two_ranks(rt)
    tokens, gradient = len(X_TD), torch.zeros(2, 2)  # of A on rank 0, of B on rank 1
    for i in range(2):
        part = slice(2 * i, 2 * i + 2)
        if rt.rank == 0:
            x_tD = X_TD[part]
            h_tF = x_tD @ A_DF
            g_tF, dg_tF = h_tF.relu(), torch.empty(2, 2)
            comm.send(g_tF, rt.world, 1)
            comm.recv(dg_tF, rt.world, 1)
            dh_tF = dg_tF.where(h_tF > 0, 0)
            gradient += x_tD.T @ dh_tF
            shown = {"in": x_tD, "out": g_tF, "gradient of out": dg_tF, "gradient of in": dh_tF @ A_DF.T}
        else:
            g_tF = torch.empty(2, 2)
            comm.recv(g_tF, rt.world, 0)
            y_tD = g_tF @ B_FD
            dy_tD = (y_tD - TARGET_TD[part]) / tokens
            dg_tF = dy_tD @ B_FD.T
            comm.send(dg_tF, rt.world, 0)
            gradient += g_tF.T @ dy_tD
            shown = {"in": g_tF, "out": y_tD, "gradient of out": dy_tD, "gradient of in": dg_tF}
        shown["dA or dB so far"] = gradient
        console(rt).print(table_of_ranks(f"pp: micro-batch {i}, each rank has a matrix", rt.world, shown))
    right = one_device()
    return verdict(rt, [(gradient, right.dA_DF if rt.rank == 0 else right.dB_FD)])


if __name__ == "__main__":
    run(main, ByHandOptions)
