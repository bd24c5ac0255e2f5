"""What a schedule holds: activations of how many micro-batches at once, counted, by formula, and measured in bytes.

    A stage keeps K bytes of a micro-batch from its forward to its backward. Held at once on rank r of p, of M:

    gpipe         M                         the forward passes come first, all of them
    1f1b          min(M, p - r)             as many as are on their way to the last stage and back
    interleaved   2(p-1-r) + (v-1)p + 1     of chunks with 1/v of the layers, where p divides M: more than 1f1b's
    zb-h1         min(M, p)                 rank r puts r weight gradients off, so that all hold what rank 0 holds
    zb-v          2p, for M >= 2p - 1       of chunks with half the layers: on every rank what 1f1b's rank 0 holds

    peak  =  held x K,  and what one computation needs for itself

What waits for W, the inputs of the products and the gradients of their outputs, is about as much as K, so it counts as
one. Checkpointing makes K the input of each layer, B S D numbers; it does not make smaller what waits for W, so zb-h1
and zb-v gain little from it. K is the mean over a rank's stages: zb-v's rank 0 has the head in one of its two.

    python pp_memory.py --nproc 4      torchrun --nproc_per_node=4 pp_memory.py      mpirun -np 4 python pp_memory.py
    python pp_memory.py --nproc 4 --checkpointing
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pp_checker import held
from pp_pipeline import Pipeline
from pp_schedules import KINDS
from pp_stages import Stage
from pp_training import PipelineOptions, check, make_batches, make_pipeline
from rich.table import Table
from torch import Tensor

from common import comm, comparison
from common.comparison import one_rank
from common.ledger import show_bytes
from common.lesson import DTYPES, console, run
from common.options import Size
from common.runtime import Runtime
from common.training import Version, make_model, training_step
from common.utils.memory import LiveBytes, saved_bytes

VERSIONS = tuple(KINDS)


@dataclass
class MemoryOptions(PipelineOptions, without=("steps", "benchmark", "scaling", "json", "plot")):
    """Micro-batches large enough that activations are most of the memory."""

    batch: Size = 16
    """Samples of the batch."""
    sequence: Size = 64
    """Tokens of a sample."""


def held_by_formula(name: str, rank: int, p: int, M: int, v: int) -> int | None:
    """Chunks of micro-batches held at once; None where there are too few micro-batches for the formula."""
    if name == "interleaved":
        ahead = 2 * (p - 1 - rank) + (v - 1) * p
        return ahead + 1 if M % p == 0 and ahead < v * M else None
    of_kind = {
        "gpipe": M,
        "1f1b": min(M, p - rank),
        "zb-h1": min(M, p),
        "zb-v": 2 * p if 2 * p - 1 <= M else None,
    }
    return of_kind[name]


def kept(pipe: Pipeline, o: MemoryOptions, rt: Runtime) -> int:
    """Bytes that autograd keeps of the largest micro-batch in this rank's stages, the mean over its stages."""
    tokens_BS, targets_BS = make_batches(o, rt.world, rt.device).parts(0)[0]
    positions_S = torch.arange(o.sequence, device=rt.device)
    x_BSD = torch.zeros(*tokens_BS.shape, pipe.model.config.width, dtype=DTYPES[o.dtype], device=rt.device)
    total = 0
    for stage in pipe.stages.values():

        def forward(stage: Stage = stage) -> Tensor:
            y: Tensor = stage(tokens_BS if stage.first else x_BSD.requires_grad_(), positions_S)
            return pipe.model.loss(y, targets_BS)[0] if stage.last else y

        total += saved_bytes(forward, pipe.model)
    return total // len(pipe.stages)


def peak(pipe: Pipeline, o: MemoryOptions, rt: Runtime) -> int:
    """The most bytes at once that a step makes, where the gradients are there before."""
    batches = make_batches(o, rt.world, rt.device)
    step = training_step(Version(pipe.model, run=pipe.run, finish=pipe.finish), batches, one_rank(rt))
    step(0)
    with LiveBytes() as live:
        step(1)
    most: int = live.peak
    return most


def main(rt: Runtime, o: MemoryOptions) -> bool:
    """Held by the checker = held by formula; bytes measured beside held x kept."""
    o = replace(o, versions=o.versions or VERSIONS)
    comparison.check(rt, VERSIONS, o)
    check(rt, o)
    title = (
        f"a rank's activations: {rt.world_size} ranks, {o.micro_batches} micro-batches, {o.model}, {o.dtype}"
    )
    table = Table("schedule", title=title, title_justify="left")
    for column in ("rank", "held", "formula", "bytes kept of one", "held x kept", "measured peak", "ratio"):
        table.add_column(column, justify="right")
    right = True
    for name in o.versions:
        pipe = make_pipeline(name, make_model(o, rt.device), rt, o)
        found = comm.everyones((kept(pipe, o, rt), peak(pipe, o, rt)), rt.world)
        for rank, (of_one, measured) in enumerate(found):
            most = held(pipe.schedule, rank)
            formula = held_by_formula(name, rank, rt.world_size, o.micro_batches, o.chunks)
            right &= formula in (None, most)
            numbers = (most, "-" if formula is None else formula)
            sizes = (show_bytes(x) for x in (of_one, most * of_one, measured))
            table.add_row(name, str(rank), *map(str, numbers), *sizes, f"{measured / (most * of_one):.2f}")
    out = console(rt)
    out.print(table)
    out.print(f"held {'=' if right else 'is NOT what is'} by formula, wherever there is one")
    return right


if __name__ == "__main__":
    run(main, MemoryOptions)
