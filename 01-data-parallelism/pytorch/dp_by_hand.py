"""Data parallelism in small integers: each rank has some of four tokens, and the gradients are summed.

    dA = x^T dh = sum over ranks of (rank's rows of x)^T (rank's rows of dh)          dB likewise

The model is common/models/by_hand.py. Each rank contributes its terms of dA and dB, eight numbers, whatever the
number of tokens.

    python dp_by_hand.py --nproc 2     torchrun --nproc_per_node=2 dp_by_hand.py     mpirun -np 2 python dp_by_hand.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common import comm
from common.data.text import rank_slice
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.runner import LessonOptions, console, run
from common.models import by_hand
from common.models.by_hand import TARGET_TD, X_TD
from common.utils.ranks import table_of_ranks


@dataclass
class Options(LessonOptions, without=("steps", "seed", "dtype", "data", "json", "plot")):
    """Options that all lessons share."""


def main(rt: Runtime, o: Options) -> bool:
    """Split the tokens over the ranks, sum the gradients, compare with one device."""
    tokens = len(X_TD)
    if rt.world_size > tokens:
        raise UsageError(f"{rt.world_size} ranks for {tokens} tokens; give at most {tokens} ranks")
    lo, hi = rank_slice(tokens, rt.rank, rt.world_size)
    mine = by_hand.step(X_TD[lo:hi], TARGET_TD[lo:hi], tokens)  # divided by the tokens of all ranks
    summed = [mine.dA_DF.clone(), mine.dB_FD.clone()]
    for gradient in summed:
        comm.all_reduce(gradient, rt.world)

    shown = {"x": X_TD[lo:hi], "h = x A": mine.h_tF, "y": mine.y_tD, "dy": mine.dy_tD}
    shown |= {"dA, its term": mine.dA_DF, "dB, its term": mine.dB_FD}
    shown |= {"dA, summed": summed[0], "dB, summed": summed[1]}
    console(rt).print(table_of_ranks("dp: each rank has some of the four tokens", rt.world, shown))
    right = by_hand.one_device()
    equal = torch.equal(summed[0], right.dA_DF) and torch.equal(summed[1], right.dB_FD)
    console(rt).print(
        f"{'proved: the sums equal' if equal else 'the sums DIFFER from'} one device's gradients"
    )
    return equal


if __name__ == "__main__":
    run(main, Options)
