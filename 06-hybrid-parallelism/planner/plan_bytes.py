"""Bytes that a rank sends in a step, by axis: the formulas of chapters 01 to 05 for the operations of a plan.

    step_bytes(job, plan)       -> {"pp": ..., "dp": ..., "ep": ..., "sp": ..., "tp": ...}

hybrid_bytes.py has these formulas for a model that is there; here only its shape is known. What a step sends beside
them, a few numbers for the loss and the gradient's norm, is left out. Gradients of dense parameters are summed over dp,
ep and sp together; they stand under dp.
"""

from __future__ import annotations

from collections import defaultdict

from plan_job import Job
from plan_layout import Plan
from plan_size import embedding
from plan_time import largest
from plan_work import Collective, Operation, ring_of
from plan_work import embedding as embedding_work
from plan_work import head as head_work
from plan_work import layer as layer_work

SHARES = {"all_reduce": 2, "gather": 1, "all_to_all": 1}


def step_bytes(job: Job, plan: Plan) -> dict[str, float]:
    """Return the bytes by axis, of the rank of the first stage; of the last one for what it alone sends."""
    M, passes = plan.micro_batches(job.batch), 3 if plan.kept == "inputs" else 2
    total: dict[str, float] = defaultdict(float)
    for shape, count in zip(job.kinds, job.layers(plan.pp)[0], strict=True):
        for axis, sent in _sent(job, plan, layer_work(shape, plan, job.code, job.sequence), passes).items():
            total[axis] += M * count * sent
    end = embedding_work if plan.pp > 1 else lambda *args: [*embedding_work(*args), *head_work(*args)]
    for axis, sent in _sent(job, plan, end(job.config, plan, job.code, job.sequence), 2).items():
        total[axis] += M * sent
    if plan.pp > 1:
        tokens = plan.micro_batch * job.sequence / plan.sp
        sides = (
            2 * plan.chunks - 1
        )  # borders of the first rank's stages, each with one message forward or back
        between = plan.tp if plan.sequence_parallel else 1
        total["pp"] += sides * M * tokens * job.config.width * job.number_bytes / between
    total["dp"] += gradient_bytes(job, plan)
    return {axis: total[axis] for axis in ("pp", "dp", "ep", "sp", "tp") if total[axis]}


def gradient_bytes(job: Job, plan: Plan) -> float:
    """Return the bytes of gradient sums and of ZeRO's gathers."""
    p, M = largest(job, plan), plan.micro_batches(job.batch)
    reduces, gathers = {0: (2, 0), 1: (1, 1), 2: (M, 1), 3: (M, 2 * M)}[plan.zero]
    each = reduces * job.code.gradient_bytes + gathers * job.code.weight_bytes
    total = sum(
        each * n * (size - 1) / size for n, size in zip((p.dense, p.experts), plan.holders, strict=True)
    )
    if job.config.tied and plan.pp > 1:
        total += job.code.gradient_bytes * embedding(job.config, plan).dense
    return total


def _sent(job: Job, plan: Plan, work: list[Operation], passes: int) -> dict[str, float]:
    """Return the bytes of some operations' collectives in all passes of a micro-batch."""
    total: dict[str, float] = defaultdict(float)
    for w in work:
        if isinstance(w, Collective):
            n = ring_of(plan, w.axis, job.machine.links).size
            if w.kind == "ring":  # keys and values; in the backward pass their gradients as well
                total[w.axis] += (passes + 1) * (n - 1) * w.nbytes
            else:
                total[w.axis] += passes * SHARES[w.kind] * w.nbytes * (n - 1) / n
    return total
