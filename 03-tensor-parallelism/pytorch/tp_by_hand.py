"""Tensor parallelism in small integers: each rank has a column of A and the row of B that meets it.

    h_r = x A[:, r]     y = sum over ranks of relu(h_r) B[r, :]          one all-reduce in the forward pass
    dx = sum over ranks of dh_r A[:, r]^T                                one in the backward pass

The model is common/models/by_hand.py. dA[:, r] and dB[r, :] are complete on their rank: nothing is sent for them.
A last table shows two mistakes: dx without its all-reduce, and dy with one, which makes dB and dA 2 times too large.

    python tp_by_hand.py --nproc 2     torchrun --nproc_per_node=2 tp_by_hand.py     mpirun -np 2 python tp_by_hand.py
"""

from __future__ import annotations

from common import comm
from common.launch.runtime import Runtime
from common.lesson.by_hand import ByHandOptions, need_two_ranks, verdict
from common.lesson.runner import console, run
from common.models.by_hand import A_DF, B_FD, TARGET_TD, X_TD, one_device
from common.utils.ranks import table_of_ranks


def main(rt: Runtime, o: ByHandOptions) -> bool:
    """Split both matrices, sum y forward and dx backward, compare with one device."""
    need_two_ranks(rt)
    f = slice(rt.rank, rt.rank + 1)
    h_Tf = X_TD @ A_DF[:, f]
    g_Tf = h_Tf.relu()
    y_part_TD = g_Tf @ B_FD[f]
    y_TD = y_part_TD.clone()
    comm.all_reduce(y_TD, rt.world)

    dy_TD = (y_TD - TARGET_TD) / len(X_TD)
    dB_fD = g_Tf.T @ dy_TD
    dh_Tf = (dy_TD @ B_FD[f].T).where(h_Tf > 0, 0)
    dA_Df = X_TD.T @ dh_Tf
    dx_part_TD = dh_Tf @ A_DF[:, f].T
    dx_TD = dx_part_TD.clone()
    comm.all_reduce(dx_TD, rt.world)

    forward = {"x": X_TD, "A, its column": A_DF[:, f], "relu(h)": g_Tf, "B, its row": B_FD[f]}
    forward |= {"y, its term": y_part_TD, "y, summed": y_TD}
    console(rt).print(table_of_ranks("tp: forward", rt.world, forward))
    backward = {"dy": dy_TD, "dB, its row": dB_fD, "dh": dh_Tf, "dA, its column": dA_Df}
    backward |= {"dx, its term": dx_part_TD, "dx, summed": dx_TD}
    console(rt).print(table_of_ranks("tp: backward", rt.world, backward))

    twice_TD = dy_TD.clone()
    comm.all_reduce(twice_TD, rt.world)  # wrong: both ranks already have the whole dy
    wrong_dh_Tf = (twice_TD @ B_FD[f].T).where(h_Tf > 0, 0)
    wrong = {"dx, not summed": dx_part_TD, "dy, summed": twice_TD, "dB from it": g_Tf.T @ twice_TD}
    wrong |= {"dA from it": X_TD.T @ wrong_dh_Tf}
    console(rt).print(table_of_ranks("tp: two mistakes in the backward pass", rt.world, wrong))
    right = one_device()
    return verdict(rt, [(y_TD, right.y_tD), (dA_Df, right.dA_DF[:, f]), (dB_fD, right.dB_FD[f])])


if __name__ == "__main__":
    run(main, ByHandOptions)
