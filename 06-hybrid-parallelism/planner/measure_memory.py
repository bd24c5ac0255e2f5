"""Measure the memory of a training step on this machine, and compare it with the planner's.

    python measure_memory.py --nproc 2 --tp 2 --model llama-10m --sequence 256 --batch 8
    torchrun --nproc_per_node=4 measure_memory.py --pp 2 --tp 2 --model gpt2-10m --sequence 256 --batch 8

Two steps of chapter 06 run while every tensor that is made is counted, from the first weight on: weights, gradients,
AdamW's states and activations. The largest sum of a rank stands beside the planner's memory of the fullest rank. What
ZeRO-3 lets go of inside a storage is not seen, so that its numbers are too large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from common import comm
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.runner import console, run
from common.utils.memory import LiveBytes

from hybrid_layout import HybridOptions
from hybrid_training import make_job, train
from plan_job import Job
from plan_layout import CODES, Plan
from plan_machine import read_machine
from plan_memory import memory
from pp_schedules import KINDS


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW that updates one parameter after the other, which needs the least memory."""
    return torch.optim.AdamW(parameters, foreach=False)


def plan_of(o: HybridOptions, shape: Mapping[str, int]) -> Plan:
    """Return the plan that a lesson's options describe."""
    places = shape["dp"] * shape["ep"]
    if o.batch % (places * o.micro_batches):
        raise UsageError(
            f"--batch {o.batch} does not divide into {o.micro_batches} equal micro-batches on each of {places} places "
            "along dp and ep"
        )
    return Plan(
        **shape,
        micro_batch=o.batch // places // o.micro_batches,
        schedule=o.schedule,
        chunks=KINDS[o.schedule].chunks or o.chunks,
        zero=o.zero,
        sequence_parallel=o.sequence_parallel,
        kept="inputs" if o.checkpointing else "all",
    )


def predicted(o: HybridOptions, plan: Plan) -> float:
    """Return the planner's bytes of the fullest rank, in float32."""
    code = replace(
        CODES["ours"], dtype="float32", logit_bytes=12
    )  # logits, their exponentials and their gradient
    return memory(Job(o.model_config(), code, read_machine("h100"), o.batch, o.sequence), plan).total


def main(rt: Runtime, o: HybridOptions) -> bool:
    """Print measured and predicted memory."""
    o.validate()
    mesh = o.mesh(rt)
    plan = plan_of(o, mesh.shape)
    with LiveBytes() as live:
        for _ in train(make_job(rt, replace(o, dtype="float32"), mesh, adamw, 2)):
            pass
    measured = max(comm.everyones(live.peak, rt.world))
    found = predicted(o, plan)
    heads = ["model", "plan", ">measured MB", ">predicted MB", ">difference"]
    row = (o.model, str(plan), f"{measured / 1e6:.1f}", f"{found / 1e6:.1f}", f"{found / measured - 1:+.1%}")
    console(rt).print(make_table("memory of the fullest rank", heads, [row]))
    return True


if __name__ == "__main__":
    run(main, HybridOptions)
