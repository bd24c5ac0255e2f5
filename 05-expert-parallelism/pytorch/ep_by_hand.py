"""Expert parallelism in small integers: each rank has two of four tokens and one of two experts.

    dispatch   rank 0 keeps token 0 and sends token 1; rank 1 sends token 2 and keeps token 3      an all-to-all
    experts    expert 0 on rank 0: y = relu(x A) B          expert 1 on rank 1: the same with another B
    combine    every row returns to the rank of its token                                          an all-to-all

Backward the rows' gradients take the same two ways. An expert's gradient is complete on its rank: it saw the tokens
of all ranks. The router's choice is given here: tokens 0 and 2 to expert 0, tokens 1 and 3 to expert 1.

    python ep_by_hand.py --nproc 2     torchrun --nproc_per_node=2 ep_by_hand.py     mpirun -np 2 python ep_by_hand.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from common import comm
from common.launch.runtime import Runtime
from common.lesson.by_hand import ByHandOptions, need_two_ranks, verdict
from common.lesson.runner import console, run
from common.models.by_hand import A_DF, B_FD, TARGET_TD, X_TD
from common.utils.ranks import table_of_ranks

EXPERT = torch.tensor([0, 1, 0, 1])  # of each token
B_EFD = torch.stack(
    [B_FD, torch.tensor([[5.0, 0], [1, 1]])]
)  # the experts share A, to keep the example short


def forward(expert: int, x_tD: Tensor) -> Tensor:
    """Return the expert's result."""
    return (x_tD @ A_DF).relu() @ B_EFD[expert]


def backward(expert: int, x_tD: Tensor, dy_tD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the expert's two matrices."""
    h_tF = x_tD @ A_DF
    dh_tF = (dy_tD @ B_EFD[expert].T).where(h_tF > 0, 0)
    return x_tD.T @ dh_tF, h_tF.relu().T @ dy_tD


def main(rt: Runtime, o: ByHandOptions) -> bool:
    """Send rows to their experts and back, forward and backward, compare with one device."""
    need_two_ranks(rt)
    mine = slice(
        2 * rt.rank, 2 * rt.rank + 2
    )  # one token for each expert: sorted already, and a row for each rank

    def travel(x_2D: Tensor) -> Tensor:
        """Send row e to the rank of expert e, or back to the rank of token e: the same exchange."""
        return comm.all_to_all(x_2D, rt.world, [1, 1], [1, 1])

    x_2D = travel(X_TD[mine])
    y_2D = forward(rt.rank, x_2D)
    combined_2D = travel(y_2D)
    dy_2D = (combined_2D - TARGET_TD[mine]) / len(X_TD)
    dy_there_2D = travel(dy_2D)
    dA_DF, dB_FD = backward(rt.rank, x_2D, dy_there_2D)

    shown = {
        "x": X_TD[mine],
        "expert": EXPERT[mine, None],
        "rows here": x_2D,
        "their y": y_2D,
        "y": combined_2D,
    }
    shown |= {"dy": dy_2D, "dy of rows here": dy_there_2D, "dA": dA_DF, "dB": dB_FD}
    console(rt).print(table_of_ranks("ep: each rank has two tokens and one expert", rt.world, shown))

    rows = rt.rank == EXPERT
    y_TD = torch.stack([forward(int(e), x[None])[0] for e, x in zip(EXPERT, X_TD, strict=True)])
    right = backward(rt.rank, X_TD[rows], ((y_TD - TARGET_TD) / len(X_TD))[rows])
    return verdict(rt, [(combined_2D, y_TD[mine]), (dA_DF, right[0]), (dB_FD, right[1])])


if __name__ == "__main__":
    run(main, ByHandOptions)
