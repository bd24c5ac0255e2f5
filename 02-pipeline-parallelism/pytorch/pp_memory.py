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
tensors that wait for W, so zb-h1 and zb-v gain little from it. K is that of the largest micro-batch, and the
mean over a rank's stages: zb-v's rank 0 has the head in one of its two.

    python pp_memory.py --nproc 4      torchrun --nproc_per_node=4 pp_memory.py      mpirun -np 4 python pp_memory.py
    python pp_memory.py --nproc 4 --checkpointing
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm.ledger import show_bytes
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.job import Job
from common.lesson.runner import DTYPES, console, run
from common.utils.memory import LiveBytes, saved_bytes

from pp_checker import held
from pp_pipeline import Pipeline
from pp_schedules import KINDS
from pp_stages import Stage
from pp_training import PipelineOptions, check, pipeline, timed_job


@dataclass
class MemoryOptions(PipelineOptions, without=("steps", "benchmark", "scaling", "json", "plot", "check")):
    """Options, with micro-batches so large that activations are most of the memory."""

    batch: Size = 16
    """Samples of the batch."""
    sequence: Size = 64
    """Tokens per sample."""


def kept(pipe: Pipeline, job: Job[MemoryOptions]) -> int:
    """Return the bytes that autograd keeps of the largest micro-batch, the mean over this rank's stages."""
    tokens_BS, targets_BS = max(next(job.batches()).parts, key=lambda part: len(part[0]))
    width, dtype = pipe.model.config.width, DTYPES[job.options.dtype]
    x_BSD = torch.zeros(*tokens_BS.shape, width, dtype=dtype, device=tokens_BS.device, requires_grad=True)

    def forward(stage: Stage) -> Tensor:
        y: Tensor = stage(tokens_BS if stage.first else x_BSD)
        return pipe.model.loss(y, targets_BS)[0] if stage.last else y

    stages = pipe.stages.values()
    return sum(saved_bytes(partial(forward, stage), pipe.model) for stage in stages) // len(stages)


def peak(pipe: Pipeline, job: Job[MemoryOptions]) -> int:
    """Return the most bytes that a step has allocated at once, if the gradients exist before it."""
    batches = job.batches()
    for _ in range(2):  # the first makes the gradients
        with LiveBytes() as live:
            batch = next(batches)
            pipe.run(batch.parts, 1 / batch.count_targets(), batch.begin)
            pipe.finish()
    return int(live.peak)


def main(rt: Runtime, o: MemoryOptions) -> bool:
    """Check that held by the checker = held by formula; print bytes measured beside held x kept."""
    o = check(rt, o, KINDS)
    title = (
        f"a rank's activations: {rt.world_size} ranks, {o.micro_batches} micro-batches, {o.model}, {o.dtype}"
    )
    table = Table("schedule", title=title, title_justify="left")
    for column in ("rank", "held", "formula", "bytes kept of one", "held x kept", "measured peak", "ratio"):
        table.add_column(column, justify="right")
    right = True
    for name in o.versions:
        job, kind = timed_job(rt, o, name), KINDS[name]
        pipe = pipeline(job, kind.schedule(rt.world_size, o.micro_batches, o.chunks))
        found = comm.everyones((kept(pipe, job), peak(pipe, job)), rt.world)
        for rank, (of_one, measured) in enumerate(found):
            most = held(pipe.schedule, rank)
            formula = kind.holds(rank, rt.world_size, o.micro_batches, o.chunks)
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
