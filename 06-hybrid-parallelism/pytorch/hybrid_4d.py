"""Four dimensions: pipeline, data and tensor parallelism, and the sequence, for contexts too long for a rank.

    8 ranks, --sp 2 --tp 2 (and dp 2): a sample of 32 tokens in zigzag order          rank = (d * sp + s) * tp + t

              s = 0: tokens 0..7, 24..31        s = 1: tokens 8..23
    d = 0     [ 0 --tp-- 1 ]  <- keys, values ->  [ 2 --tp-- 3 ]           samples 0 to 3
    d = 1     [ 4 --tp-- 5 ]  <- keys, values ->  [ 6 --tp-- 7 ]           samples 4 to 7

A rank holds its heads (tp) of its tokens (sp): the ring of rank 1 is {1, 3} and carries only the keys of rank
1's heads, half the bytes of a ring without tp. For the weights sp is one more data axis: their gradients are
summed over dp and sp together, in one message.

    python hybrid_4d.py --nproc 8 --sp 2 --tp 2                 mpirun -np 8 python hybrid_4d.py --pp 2 --sp 2 --tp 2
    torchrun --nproc_per_node=8 hybrid_4d.py --sp 4 --pp 2 --attention ulysses
"""

from __future__ import annotations

from dataclasses import dataclass

from common.launch.runtime import Runtime
from common.lesson.runner import run

from hybrid_training import HybridOptions, lesson


@dataclass
class Options(HybridOptions, without=("ep",)):
    """Options: a dense model on pp, dp, sp and tp."""

    model: str = "llama-tiny"
    """Name of a model in common/models/configs.py."""


def main(rt: Runtime, o: Options) -> bool:
    """Compare four dimensions with one device; with --benchmark only time them."""
    return lesson(rt, o)


if __name__ == "__main__":
    run(main, Options)
