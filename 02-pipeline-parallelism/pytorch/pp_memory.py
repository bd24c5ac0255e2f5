"""Activations that a schedule holds at once: micro-batches, counted and by formula, and bytes, measured.

    A stage keeps K bytes per micro-batch from forward to backward. Held at once on rank r of p, of M:

    gpipe         M                         all forward passes come first
    1f1b          min(M, p - r)             as many as are on their way to the last stage and back
    interleaved   2(p-1-r) + (v-1)p + 1     chunks with 1/v of the layers, if p divides M: more than 1f1b's
    zb-h1         min(M, p)                 rank r defers r weight gradients, so all hold as many as rank 0
    zb-v          2p, for M >= 2p - 1       chunks with half the layers: all hold as much as 1f1b's rank 0

    peak  =  held x K,  plus the temporary memory of one computation

The tensors that wait for W, inputs of products and gradients of their outputs, take about K bytes, so they
count as one micro-batch. Checkpointing reduces K to the input of each layer, B S D numbers, but not the
tensors that wait for W, so zb-h1 and zb-v gain little from it. K is the mean over a rank's stages: zb-v's
rank 0 has the head in one of its two.

    python pp_memory.py --nproc 4      torchrun --nproc_per_node=4 pp_memory.py      mpirun -np 4 python pp_memory.py
    python pp_memory.py --nproc 4 --checkpointing
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm.ledger import show_bytes
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.job import Job
from common.lesson.runner import DTYPES, console, run
from common.utils.memory import LiveBytes, saved_bytes

from pp_checker import held
from pp_pipeline import Pipeline
from pp_schedules import KINDS
from pp_stages import Stage
from pp_training import PipelineOptions, check, pipeline, timed_job

VERSIONS = tuple(KINDS)


@dataclass
class MemoryOptions(PipelineOptions, without=("steps", "benchmark", "scaling", "json", "plot")):
    """Options, with micro-batches so large that activations are most of the memory."""

    batch: Size = 16
    """Samples of the batch."""
    sequence: Size = 64
    """Tokens per sample."""


def held_by_formula(name: str, rank: int, p: int, M: int, v: int) -> int | None:
    """Return the chunks of micro-batches that `rank` holds at once.

    None where there are too few micro-batches for the formula.
    """
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


def kept(pipe: Pipeline, job: Job[MemoryOptions]) -> int:
    """Return the bytes that autograd keeps of the first micro-batch, the mean over this rank's stages."""
    tokens_BS, targets_BS = next(job.batches()).parts[0]
    positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    shape, dtype = (*tokens_BS.shape, pipe.model.config.width), DTYPES[job.options.dtype]
    x_BSD = torch.zeros(shape, dtype=dtype, device=tokens_BS.device)
    total = 0
    for stage in pipe.stages.values():

        def forward(stage: Stage = stage) -> Tensor:
            y: Tensor = stage(tokens_BS if stage.first else x_BSD.requires_grad_(), positions_S)
            return pipe.model.loss(y, targets_BS)[0] if stage.last else y

        total += saved_bytes(forward, pipe.model)
    return total // len(pipe.stages)


def peak(pipe: Pipeline, job: Job[MemoryOptions]) -> int:
    """Return the most bytes that a step has allocated at once, if the gradients exist before it."""
    batches = job.batches()

    def step() -> None:
        batch = next(batches)
        pipe.run(batch.parts, 1 / batch.count_targets(), batch.begin)
        pipe.finish()

    step()
    with LiveBytes() as live:
        step()
    most: int = live.peak
    return most


def main(rt: Runtime, o: MemoryOptions) -> bool:
    """Check that held by the checker = held by formula; print bytes measured beside held x kept."""
    o = replace(o, versions=o.versions or VERSIONS)
    comparison.check(rt, VERSIONS, o)
    check(rt, o, [KINDS[name] for name in o.versions])
    title = (
        f"a rank's activations: {rt.world_size} ranks, {o.micro_batches} micro-batches, {o.model}, {o.dtype}"
    )
    table = Table("schedule", title=title, title_justify="left")
    for column in ("rank", "held", "formula", "bytes kept of one", "held x kept", "measured peak", "ratio"):
        table.add_column(column, justify="right")
    right = True
    for name in o.versions:
        job = timed_job(rt, o, name)
        pipe = pipeline(job, KINDS[name].schedule(rt.world_size, o.micro_batches, o.chunks))
        found = comm.everyones((kept(pipe, job), peak(pipe, job)), rt.world)
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
