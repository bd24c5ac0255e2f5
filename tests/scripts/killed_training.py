"""Train as train_llama.py does, but kill the last rank before one step of the first start.

torchrun --nproc_per_node=2 --max-restarts=1 killed_training.py 3 --steps 6 ...
"""

import os
import signal
import sys

from training_runs import CONFIGS

from common.launch.runtime import Runtime
from common.lesson.runner import run

from hybrid_options import TrainOptions, parse
from hybrid_trainer import Trainer, start

AT = int(sys.argv.pop(1))
train = Trainer.train


def killed(self: Trainer) -> dict[str, float]:
    """Train a step, or kill this process before it."""
    first, last = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", self.rt.rank == self.rt.world_size - 1
    if self.step == AT and first and last:
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self)


def main(rt: Runtime, o: TrainOptions) -> bool:
    """Train as the example does, with the fault."""
    Trainer.train = killed  # type: ignore[method-assign]
    return start(rt, o).run()


if __name__ == "__main__":
    assert "nano-llama" in CONFIGS
    run(main, TrainOptions, parse)
