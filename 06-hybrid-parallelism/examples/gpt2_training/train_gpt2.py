"""Train a GPT-2 on tokens of a tokenizer.json, on any mesh; with dropout, which GPT-2 has and LLaMA does not.

    python train_tokenizer.py                                                 tokenizer.json, from Python's sources
    python train_gpt2.py --config gpt2-10m.toml --nproc 4                     4 ranks of this machine
    torchrun --nproc_per_node=4 train_gpt2.py --config gpt2-10m.toml
    mpirun -np 4 python train_gpt2.py --config gpt2-10m.toml --pp 1 --dp 2

The run is that of train_llama.py: its exit codes, checkpoints, signals and logs are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from common.launch import spawn
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.lesson.runner import run
from common.models.configs import TransformerConfig

from hybrid_options import TrainOptions, parse
from hybrid_signals import pass_on
from hybrid_trainer import train


@dataclass
class Options(TrainOptions):
    """Options of a GPT-2's training."""

    model: str = "gpt2-10m"
    """Name of a model in common/models/configs.py: gpt2-tiny, gpt2-10m, gpt2, gpt2-medium, gpt2-large, gpt2-xl."""
    dropout: Annotated[float, Within(0, 0.99)] = 0.0
    """Share of numbers that training sets to zero; GPT-2 was trained with 0.1. A long text needs none."""

    def model_config(self) -> TransformerConfig:
        """Return the model's shape, with dropout."""
        return replace(super().model_config(), dropout=self.dropout)


def main(rt: Runtime, o: Options) -> bool:
    """Train as the options say; return True unless the run could not go on."""
    return train(rt, o)


if __name__ == "__main__":
    pass_on()
    spawn.PRELOAD.append("hybrid_trainer")  # imported once for all ranks
    run(main, Options, parse)
