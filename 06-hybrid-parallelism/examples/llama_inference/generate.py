"""Generate text with a LLaMA on any mesh of pp and tp, many requests at once.

    python generate.py --prompts "def f(" "class A"                          a tiny LLaMA with its initial values
    torchrun --nproc_per_node=4 generate.py --checkpoint FOLDER --pp 2       lines of the terminal are prompts
    mpirun -np 2 python generate.py --checkpoint FOLDER --file requests.jsonl --json times.jsonl

Exit code 0: all requests have ended. 1: a rank failed. 2: bad input.
"""

from __future__ import annotations

from common.launch import spawn
from common.lesson.runner import run

from hybrid_options import parse
from infer_options import GenerateOptions
from infer_run import main

if __name__ == "__main__":
    spawn.PRELOAD.append("infer_run")  # imported once for all ranks
    run(main, GenerateOptions, parse)
