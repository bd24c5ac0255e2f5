"""train_llama.py with a fault of the test's own: the last rank is killed, or hangs, before a step of its first start.

torchrun --nproc_per_node=2 --max-restarts=1 faulty_training.py kill 3 --steps 6 ...
"""

import os
import signal
import sys

from hybrid_options import TrainOptions, parse
from hybrid_trainer import Trainer, start
from training_runs import CONFIGS

from common.lesson import run
from common.runtime import Runtime

FAULT, AT = sys.argv.pop(1), int(sys.argv.pop(1))
train = Trainer.train


def faulty(self: Trainer) -> dict[str, float]:
    """A step, or the fault before it."""
    first, last = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0", self.rt.rank == self.rt.world_size - 1
    if self.step == AT and last:
        if FAULT == "kill" and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
    return train(self)


def main(rt: Runtime, o: TrainOptions) -> bool:
    """As the example's."""
    Trainer.train = faulty  # type: ignore[method-assign]
    return start(rt, o).run()


if __name__ == "__main__":
    assert "nano-llama" in CONFIGS
    run(main, TrainOptions, parse)
