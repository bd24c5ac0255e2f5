"""Four dimensions: to pipeline, data and tensor parallelism comes the sequence, for contexts that fit no rank.

    8 ranks, --sp 2 --tp 2 (and dp 2): a sample of 32 tokens in zigzag order          rank = (d * sp + s) * tp + t

              s = 0: tokens 0..7, 24..31        s = 1: tokens 8..23
    d = 0     [ 0 --tp-- 1 ]  <- keys, values ->  [ 2 --tp-- 3 ]           samples 0 to 3
    d = 1     [ 4 --tp-- 5 ]  <- keys, values ->  [ 6 --tp-- 7 ]           samples 4 to 7

A rank has its heads (tp) of its tokens (sp): the ring of rank 1 is {1, 3} and carries the keys of rank 1's heads alone,
half of what a ring without tp carries. For the weights sp is one more data axis: their gradients are summed over dp and
sp together, in one message.

    python hybrid_4d.py --nproc 8 --sp 2 --tp 2                 mpirun -np 8 python hybrid_4d.py --pp 2 --sp 2 --tp 2
    torchrun --nproc_per_node=8 hybrid_4d.py --sp 4 --pp 2 --attention ulysses
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_training import HybridOptions, lesson

from common.lesson import run
from common.runtime import Runtime


@dataclass
class Options(HybridOptions, without=("ep",)):
    """A dense model on pp, dp, sp and tp."""

    model: str = "llama-tiny"
    """A name of common/models/configs.py."""


def main(rt: Runtime, o: Options) -> bool:
    """Four dimensions against one device; with --benchmark their time alone."""
    return lesson(rt, o)


if __name__ == "__main__":
    run(main, Options)
