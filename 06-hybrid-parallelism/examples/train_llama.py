"""Train a language model on any mesh, stop it, resume it on another.

    python train_llama.py                                                    a tiny LLaMA on Python's sources, one rank
    python train_llama.py --config tiny.toml --nproc 4                       4 ranks of this machine; as the file says
    torchrun --nproc_per_node=8 train_llama.py --config llama-10m.toml       10 M parameters
    mpirun -np 8 python train_llama.py --config llama-10m.toml --pp 1 --dp 4 --tp 2

Exit code 0: all steps are done, or it was told to stop (SIGTERM, SIGINT) and has written a checkpoint; stopping when
asked is no failure, and whoever restarts what failed need not. 1: it could not go on. 2: bad input.
"""

from __future__ import annotations

import signal

from hybrid_options import TrainOptions, parse
from hybrid_signals import TRACE, pass_on
from hybrid_trainer import make, start

from common import spawn
from common.lesson import run
from common.runtime import Runtime


def main(rt: Runtime, o: TrainOptions) -> bool:
    """From the newest good checkpoint, or from the beginning, to the last step; with --explain --steps 0 to none."""
    signal.signal(TRACE, signal.SIG_IGN)  # until there is a step to trace
    if o.steps:
        return start(rt, o).run()
    make(rt, o)
    return True


if __name__ == "__main__":
    pass_on()
    spawn.PRELOAD.append("hybrid_trainer")  # imported once for all ranks
    run(main, TrainOptions, parse)
