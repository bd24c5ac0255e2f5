"""Three dimensions: pipeline, data and tensor parallelism, the layout of most large dense models.

    8 ranks, --pp 2 --dp 2 --tp 2                                          rank = (p * dp + d) * tp + t

              first layers                    last layers
    d = 0     [ 0 --tp-- 1 ]  --activations-> [ 4 --tp-- 5 ]               samples 0 to 3
                |        |                      |        |
              gradients  |                    gradients  |
                |        |                      |        |
    d = 1     [ 2 --tp-- 3 ]  --activations-> [ 6 --tp-- 7 ]               samples 4 to 7

tp communicates most, several times per layer, so its ranks are neighbours and share a host. pp communicates
least, one message per micro-batch, and may cross hosts. dp sums gradients once per step, and the backward
pass can hide that sum. (Narayanan et al., "Efficient large-scale language model training on GPU clusters
using Megatron-LM", arXiv:2104.04473, section 3.)

    python hybrid_3d.py --nproc 8 --pp 2 --tp 2                 mpirun -np 4 python hybrid_3d.py --pp 2 --tp 2
    torchrun --nproc_per_node=8 hybrid_3d.py --pp 2 --tp 2 --zero 1 --schedule zb-h1
"""

from __future__ import annotations

from dataclasses import dataclass

from common.launch.runtime import Runtime
from common.lesson.runner import run

from hybrid_training import HybridOptions, lesson


@dataclass
class Options(HybridOptions, without=("ep", "sp", "attention")):
    """Options: a dense model on pp, dp and tp."""

    model: str = "llama-tiny"
    """Name of a model in common/models/configs.py."""


def main(rt: Runtime, o: Options) -> bool:
    """Compare three dimensions with one device; with --benchmark only time them."""
    return lesson(rt, o)


if __name__ == "__main__":
    run(main, Options)
