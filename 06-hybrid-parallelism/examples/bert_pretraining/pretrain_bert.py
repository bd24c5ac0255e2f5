"""Pretrain a BERT on masked tokens, on any mesh.

    python pretrain_bert.py                                                      a small BERT, one rank
    python pretrain_bert.py --config bert-small.toml --nproc 4                   4 ranks of this machine
    torchrun --nproc_per_node=4 pretrain_bert.py --config bert-small.toml
    mpirun -np 4 python pretrain_bert.py --config bert-small.toml --dp 1 --tp 2 --sp 2

The run is that of train_llama.py: its exit codes, checkpoints, signals and logs are the same. hybrid_masked.py hides
the tokens.
"""

from __future__ import annotations

from common.launch import spawn
from common.launch.runtime import Runtime
from common.lesson.runner import run

from hybrid_masked import MaskedOptions
from hybrid_options import parse
from hybrid_pretraining import Pretraining
from hybrid_signals import pass_on
from hybrid_trainer import train


def main(rt: Runtime, o: MaskedOptions) -> bool:
    """Train as the options say; return True unless the run could not go on."""
    return train(rt, o, Pretraining)


if __name__ == "__main__":
    pass_on()
    spawn.PRELOAD.append("hybrid_pretraining")  # imported once for all ranks
    run(main, MaskedOptions, parse)
