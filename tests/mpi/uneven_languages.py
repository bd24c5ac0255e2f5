"""hybrid_languages.py on models of three heads, of which nothing else divides by three ranks, one after the other."""

from __future__ import annotations

from dataclasses import replace

from common.launch.runtime import Runtime
from common.lesson.runner import run
from common.models.configs import CONFIGS, gpt2, llama

from hybrid_languages import LanguageOptions, main

CONFIGS["test-gpt2"] = gpt2(layers=2, width=12, heads=3, sequence=16)
CONFIGS["test-llama"] = llama(2, 12, heads=3, kv_heads=3, mlp_width=13, sequence=16)


def prove(rt: Runtime, o: LanguageOptions) -> bool:
    """Compare the versions that have the model."""
    in_torch = replace(o, model="test-llama", sequence_parallel=True, versions=("pytorch", "hybrid_libtorch"))
    return all([main(rt, replace(o, model="test-gpt2")), main(rt, in_torch)])


if __name__ == "__main__":
    run(prove, LanguageOptions)
