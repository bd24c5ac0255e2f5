"""Activations that a layer keeps for its backward pass under tensor parallelism, by formula and counted.

Numbers kept per token and layer of GPT-2, with width D, MLP width F and H heads, on each of n ranks:

                          one device       plain, n ranks           sequence parallel, n ranks
    norms: their inputs   2 D + 4          2 D + 4                  2 D / n + 4 / n
    regions: inputs       2 D              2 D                      2 D
    regions: inside       4 D + 2 F + H    (4 D + 2 F + H) / n      (4 D + 2 F + H) / n

Inside a region are q, k, v, the result of attention and the H log-sums of its softmax, and up before and
after the GELU. Activations outside the regions are whole on all ranks unless sequence parallelism splits them
(Korthikanti et al., 2022, arXiv:2205.05198, section 4.2). The gathered inputs of the regions stay whole here;
Megatron-LM keeps their slices and gathers them again in the backward pass: it sends (n-1)/n of 2 D numbers
more, to keep as many fewer.

    python tp_memory.py --nproc 4     torchrun --nproc_per_node=4 tp_memory.py     mpirun -np 4 python tp_memory.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from common.comm import Group
from common.comm.ledger import show_bytes
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.comparison import check
from common.lesson.runner import DTYPES, console, run
from common.models.transformer import Transformer
from common.utils.memory import saved_bytes

from tp_megatron import MegatronOptions, check_split, tensor_parallel
from tp_training import show, tp_group

VERSIONS = ("one device", "plain", "sequence-parallel")


def by_formula(name: str, o: MegatronOptions, n: int) -> Fraction:
    """Return the bytes that a layer keeps on each of n ranks. Raises UsageError unless it is GPT-2's and divides."""
    c = o.model_config()
    if c.mlp != "gelu" or o.sequence % n or c.mlp_width % n:
        raise UsageError(
            f"--model {o.model} --sequence {o.sequence}: the formula is that of GPT-2, its MLP and the "
            f"sequence divided by {n} ranks; gpt2-tiny with 32 tokens would do on 1, 2 and 4"
        )
    inside, outside = 4 * c.width + 2 * c.mlp_width + c.heads, 2 * c.width + 4
    split = 1 if name == "one device" else n
    numbers = (
        Fraction(outside, n if name == "sequence-parallel" else 1) + 2 * c.width + Fraction(inside, split)
    )
    return o.batch * o.sequence * DTYPES[o.dtype].itemsize * numbers


def counted(name: str, o: MegatronOptions, group: Group, device: torch.device) -> int:
    """Return the bytes that a layer keeps: those that two layers keep minus those that one keeps."""
    tokens_BS = torch.zeros(o.batch, o.sequence, dtype=torch.long, device=device)

    def kept(layers: int) -> int:
        model = Transformer(replace(o.model_config(), layers=layers), o.seed, DTYPES[o.dtype]).to(device)
        if name != "one device":
            tensor_parallel(model, group, name == "sequence-parallel")
        return saved_bytes(lambda: model.loss(model(tokens_BS), tokens_BS)[0], model)

    return kept(2) - kept(1)


@dataclass
class MemoryOptions(
    MegatronOptions,
    without=("steps", "micro_batches", "dropout", "benchmark", "scaling", "data", "json", "plot", "check"),
):
    """Model and batch of this lesson."""


def main(rt: Runtime, o: MemoryOptions) -> bool:
    """Print the table; True if the counted bytes are exactly those of the formula."""
    check_split(o.model_config(), rt.world_size)
    check(rt, VERSIONS, o)
    one, *formulas = (by_formula(name, o, rt.world_size) for name in ("one device", *o.versions))
    found = [counted(name, o, tp_group(rt), rt.device) for name in o.versions]
    title = f"bytes that a layer keeps on a rank: {o.model}, {o.dtype}, {o.batch} x {o.sequence} tokens"
    title += f", {rt.world_size} ranks"
    rows = [
        (name, show_bytes(kept), show_bytes(formula), f"{float(formula / one):.0%}")
        for name, kept, formula in zip(o.versions, found, formulas, strict=True)
    ]
    show(rt, title, ("version", "counted", "formula", "of one device"), rows)
    console(rt).print("counted = formula" if found == formulas else "what is counted is NOT the formula")
    return found == formulas


if __name__ == "__main__":
    run(main, MemoryOptions, versions=VERSIONS)
