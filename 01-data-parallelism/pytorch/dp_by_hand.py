"""Data parallelism in small integers: each rank has two of four tokens, and the gradients are summed.

    dA = x^T dh = sum over ranks of (rank's rows of x)^T (rank's rows of dh)          dB likewise

The model is common/models/by_hand.py. Each rank contributes its terms of dA and dB, eight numbers, whatever the
number of tokens.

    python dp_by_hand.py --nproc 2     torchrun --nproc_per_node=2 dp_by_hand.py     mpirun -np 2 python dp_by_hand.py
"""

from __future__ import annotations

from common import comm
from common.launch.runtime import Runtime
from common.lesson.by_hand import ByHandOptions, need_two_ranks, verdict
from common.lesson.runner import console, run
from common.models.by_hand import TARGET_TD, X_TD, one_device, step
from common.utils.ranks import table_of_ranks


def main(rt: Runtime, o: ByHandOptions) -> bool:
    """Split the tokens over the ranks, sum the gradients, compare with one device."""
    need_two_ranks(rt)
    mine = slice(2 * rt.rank, 2 * rt.rank + 2)
    here = step(X_TD[mine], TARGET_TD[mine], len(X_TD))  # divided by the tokens of all ranks
    dA_DF, dB_FD = here.dA_DF.clone(), here.dB_FD.clone()
    comm.all_reduce(dA_DF, rt.world)
    comm.all_reduce(dB_FD, rt.world)

    shown = {"x": X_TD[mine], "h = x A": here.h_tF, "y": here.y_tD, "dy": here.dy_tD}
    shown |= {
        "dA, its term": here.dA_DF,
        "dB, its term": here.dB_FD,
        "dA, summed": dA_DF,
        "dB, summed": dB_FD,
    }
    console(rt).print(table_of_ranks("dp: each rank has two of the four tokens", rt.world, shown))
    right = one_device()
    return verdict(rt, [(dA_DF, right.dA_DF), (dB_FD, right.dB_FD)])


if __name__ == "__main__":
    run(main, ByHandOptions)
