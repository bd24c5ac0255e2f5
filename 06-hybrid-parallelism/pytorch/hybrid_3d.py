"""Three dimensions: pipeline, data and tensor parallelism, the layout of most large dense models.

    8 ranks, --pp 2 --dp 2 --tp 2                                          rank = (p * dp + d) * tp + t

              first layers                    last layers
    d = 0     [ 0 --tp-- 1 ]  --activations-> [ 4 --tp-- 5 ]               samples 0 to 3
                |        |                      |        |
              gradients  |                    gradients  |
                |        |                      |        |
    d = 1     [ 2 --tp-- 3 ]  --activations-> [ 6 --tp-- 7 ]               samples 4 to 7

tp talks most, several times a layer, so its ranks are neighbours and share a host. pp talks least, a message a
micro-batch, and may cross hosts. dp sums gradients once a step, which the backward pass can hide. (Narayanan et al.,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", arXiv:2104.04473, section 3.)

    python hybrid_3d.py --nproc 8 --pp 2 --tp 2                 mpirun -np 4 python hybrid_3d.py --pp 2 --tp 2
    torchrun --nproc_per_node=8 hybrid_3d.py --pp 2 --tp 2 --zero 1 --schedule zb-h1
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_training import HybridOptions, lesson

from common.lesson import run
from common.runtime import Runtime


@dataclass
class Options(HybridOptions, without=("ep", "sp", "attention")):
    """A dense model on pp, dp and tp."""

    model: str = "llama-tiny"
    """A name of common/models/configs.py."""


def main(rt: Runtime, o: Options) -> bool:
    """Three dimensions against one device; with --benchmark their time alone."""
    return lesson(rt, o)


if __name__ == "__main__":
    run(main, Options)
