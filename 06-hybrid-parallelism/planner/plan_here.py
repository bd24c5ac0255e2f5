"""A run of chapter 06 as the planner sees it: its options as a plan, its model and types as a job.

plan_of(o, mesh.shape, o.batch)     -> Plan
peak_table(o, config, mesh.shape, dtype, batch, sequence)       # of --explain: the fullest rank's memory by kind
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, fields, replace

from rich.table import Table

from common.comm.ledger import show_bytes
from common.launch.terminal import make_table
from common.models.configs import TransformerConfig

from hybrid_layout import Layout
from plan_job import Job
from plan_layout import CODES, OUR_LOGIT_BYTES, Plan
from plan_machine import SIZES, Machine, read_machine
from plan_memory import Memory, memory
from pp_schedules import KINDS


def plan_of(o: Layout, shape: Mapping[str, int], batch: int) -> Plan:
    """Return the plan that options describe. Of uneven micro-batches it has the largest."""
    return Plan(
        **shape,
        micro_batch=math.ceil(math.ceil(batch / (shape["dp"] * shape["ep"])) / o.micro_batches),
        schedule=o.schedule,
        chunks=KINDS[o.schedule].chunks or o.chunks,
        zero=o.zero,
        sequence_parallel=o.sequence_parallel,
        kept="inputs" if o.checkpointing else "all",
    )


def job_of(
    config: TransformerConfig,
    o: Layout,
    plan: Plan,
    sequence: int,
    dtype: str,
    machine: Machine | None = None,
) -> Job:
    """Return the job whose step is that many micro-batches of the plan. dtype: of weights and gradients."""
    size = SIZES[dtype]
    code = replace(
        CODES["ours"],
        dtype=dtype if o.precision == "full" else o.precision,
        weight_bytes=size,
        gradient_bytes=size,
        state_bytes=2 * size,
        logit_bytes=OUR_LOGIT_BYTES * size / 4,
    )
    batch = plan.samples * plan.micro_batch * o.micro_batches
    return Job(config, code, machine or read_machine("cpu"), batch, sequence)


def peak_table(
    o: Layout, config: TransformerConfig, shape: Mapping[str, int], dtype: str, batch: int, sequence: int
) -> Table:
    """Return a table of the fullest rank's bytes in a step by kind."""
    plan = plan_of(o, shape, batch)
    held = memory(job_of(config, o, plan, sequence, dtype), plan)
    rows = [(f.name, show_bytes(round(n))) for f, n in zip(fields(Memory), astuple(held), strict=True)]
    title = "bytes of the fullest rank while a step runs, as the planner counts them"
    return make_table(title, ["kind", ">bytes"], [*rows, ("all", show_bytes(round(held.total)))])
