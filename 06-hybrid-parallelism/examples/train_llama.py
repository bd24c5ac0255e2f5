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

import signal

from common.launch import spawn
from common.launch.runtime import Runtime
from common.lesson.runner import run

from hybrid_options import TrainOptions, parse
from hybrid_signals import TRACE, pass_on
from hybrid_trainer import make, start


def main(rt: Runtime, o: TrainOptions) -> bool:
    """Train from the newest good checkpoint, or from step 0, to the last step; --steps 0: only explain."""
    signal.signal(TRACE, signal.SIG_IGN)  # until there is a step to trace
    if o.steps:
        return start(rt, o).run()
    make(rt, o)
    return True


if __name__ == "__main__":
    pass_on()
    spawn.PRELOAD.append("hybrid_trainer")  # imported once for all ranks
    run(main, TrainOptions, parse)
