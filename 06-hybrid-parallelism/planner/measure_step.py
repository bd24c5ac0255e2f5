"""Compare the memory and the time of training steps on this machine with the planner's.

    python measure_step.py --nproc 2 --tp 2 --model llama-10m --sequence 256 --batch 8 --machine cpu
    torchrun --nproc_per_node=4 measure_step.py --pp 2 --tp 2 --model gpt2-10m --sequence 256 --batch 8

Two steps of chapter 06 run while every tensor that is made is counted, from the first weight on: weights, gradients,
AdamW's states and activations. The largest sum of a rank stands beside the planner's memory of the fullest rank. Bytes
of ZeRO-3 are left out: it frees parts of a storage, which the count on a processor misses. Then it times --steps steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from common import comm
from common.errors import UsageError
from common.launch.command_line import Count
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.measure import in_turn
from common.lesson.runner import console, run, write_records
from common.utils.memory import LiveBytes

from hybrid_layout import HybridOptions
from hybrid_training import make_job, train
from plan_here import job_of, plan_of
from plan_machine import read_machine
from plan_memory import memory
from plan_time import predict


@dataclass
class MeasureOptions(HybridOptions, without=("benchmark", "scaling", "explain", "check")):
    """Options of the mesh, and the machine whose numbers predict."""

    steps: Count = 5
    """Steps to time, after two in which tensors are counted."""
    memory_only: bool = False
    """Count tensors, and time no step."""
    dtype: Literal["float32"] = "float32"
    """Type of weights and gradients."""
    machine: str = "cpu"
    """Name of a machine, or a .toml file that calibrate.py has written."""


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW that updates one parameter after the other, which needs the least memory."""
    return torch.optim.AdamW(parameters, foreach=False)


def main(rt: Runtime, o: MeasureOptions) -> bool:
    """Print measured and predicted memory and time. Raises UsageError where the options do not fit."""
    mesh = o.mesh(rt)
    plan = plan_of(o, mesh.shape, o.batch)
    job = job_of(o.model_config(), o, plan, o.sequence, o.dtype, read_machine(o.machine))
    if job.batch != o.batch:
        raise UsageError(
            f"--batch {o.batch} does not divide into {o.micro_batches} equal micro-batches on each of {plan.samples} "
            f"places along dp and ep; --batch {job.batch} would do"
        )
    if not o.memory_only and job.code.dtype not in job.machine.peak:
        raise UsageError(
            f"{o.machine} has no peak for {job.code.dtype}; it has one for {', '.join(job.machine.peak)}"
        )
    steps = train(make_job(rt, o, mesh, adamw))
    with LiveBytes() as live:
        for _ in range(2):
            next(steps)
    row: dict[str, Any] = {"model": o.model, "plan": str(plan), "ranks": rt.world_size}
    if o.zero < 3:
        held = live.peak if rt.device.type == "cpu" else torch.cuda.max_memory_allocated()
        row |= {"bytes": max(comm.everyones(held, rt.world)), "predicted bytes": memory(job, plan).total}
    if not o.memory_only:
        took = in_turn({"step": partial(next, steps)}, o.steps, rt.world, device=rt.device.type)["step"]
        row |= {"seconds": took.median, "spread": took.spread, "predicted seconds": predict(job, plan).step}
    heads = ["of a step", ">measured", ">predicted", ">difference"]
    table = make_table(f"{o.model}, {plan}, in {job.code.dtype}", heads)
    for what, unit, scale in (("bytes", "MB of the fullest rank", 1e-6), ("seconds", "ms", 1e3)):
        if what in row:
            measured, found = row[what], row[f"predicted {what}"]
            table.add_row(
                unit, f"{scale * measured:.1f}", f"{scale * found:.1f}", f"{found / measured - 1:+.1%}"
            )
    console(rt).print(table)
    if rt.rank == 0:
        write_records(o.json, [row])
    return True


if __name__ == "__main__":
    run(main, MeasureOptions)
