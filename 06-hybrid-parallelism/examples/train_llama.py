"""Train a language model on any mesh, stop it, resume it on another.

    python train_llama.py                                                    a tiny LLaMA on Python's sources, one rank
    python train_llama.py --config tiny.toml --nproc 4                       4 ranks of this machine; as the file says
    torchrun --nproc_per_node=8 train_llama.py --config llama-10m.toml       10 M parameters
    mpirun -np 8 python train_llama.py --config llama-10m.toml --pp 1 --dp 4 --tp 2

Exit code 0: all steps are done, or the run was told to stop (SIGTERM, SIGINT) and has written a checkpoint; a
requested stop is not a failure, so a supervisor need not restart the run. 1: the run could not go on. 2: bad
input.
"""

from __future__ import annotations

from common.launch import spawn
from common.launch.runtime import Runtime
from common.lesson.runner import run

from hybrid_options import TrainOptions, parse
from hybrid_signals import pass_on
from hybrid_trainer import train


def main(rt: Runtime, o: TrainOptions) -> bool:
    """Train as the options say; return True unless the run could not go on."""
    return train(rt, o)


if __name__ == "__main__":
    pass_on()
    spawn.PRELOAD.append("hybrid_trainer")  # imported once for all ranks
    run(main, TrainOptions, parse)
