"""train_llama.py, in which the last rank is killed before a step of its first start.

torchrun --nproc_per_node=2 --max-restarts=1 killed_training.py 3 --steps 6 ...
"""

import os
import signal
import sys

from hybrid_options import TrainOptions, parse
from hybrid_trainer import Trainer, start
from training_runs import CONFIGS

from common.lesson import run
from common.runtime import Runtime

AT = int(sys.argv.pop(1))
train = Trainer.train


def killed(self: Trainer) -> dict[str, float]:
    """A step, or the end before it."""
    first, last = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", self.rt.rank == self.rt.world_size - 1
    if self.step == AT and first and last:
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self)


def main(rt: Runtime, o: TrainOptions) -> bool:
    """As the example's."""
    Trainer.train = killed  # type: ignore[method-assign]
    return start(rt, o).run()


if __name__ == "__main__":
    assert "nano-llama" in CONFIGS
    run(main, TrainOptions, parse)
