"""The memory of a rank: weights, gradients, states of the optimizer, and the activations that backward passes wait for.

    memory(job, plan)       -> Memory of the pipeline's fullest rank, in bytes

What a layer keeps is counted tensor by tensor, as autograd keeps them: the input of each product and norm, queries,
keys, values and result of attention, the arguments of an activation (Korthikanti et al., arXiv:2205.05198, section 4,
for GPT). The schedule says how many micro-batches a rank holds at once (`Kind.holds` in chapter 02).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.models.configs import TransformerConfig

from plan_job import Job
from plan_layout import Code, Plan
from plan_machine import SIZES
from plan_models import head_widths, projections
from plan_size import NONE, Parameters, embedding, head, layer
from pp_schedules import KINDS


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its fullest."""

    weights: float
    gradients: float
    states: float
    activations: float
    buffers: float
    """Logits and their gradient; a layer's weight gradients before they are added; weights that ZeRO-3 has gathered."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.states + self.activations + self.buffers


def memory(job: Job, plan: Plan) -> Memory:
    """Return the memory of the rank of the pipeline that holds most."""
    return max((of_rank(job, plan, rank) for rank in range(plan.pp)), key=lambda m: m.total)


def layers_of(job: Job, plan: Plan, rank: int) -> tuple[list[tuple[TransformerConfig, int]], bool, bool]:
    """Return a rank's layers by shape with their numbers, and whether it has the first and the last stage."""
    owner = KINDS[plan.schedule].owner(plan.pp, plan.chunks)
    stages = [i for i, of in enumerate(owner) if of == rank]
    counts = [sum(of_kind) for of_kind in zip(*(job.layers(len(owner))[i] for i in stages), strict=True)]
    shapes = [(shape, n) for shape, n in zip(job.kinds, counts, strict=True) if n]
    return shapes, 0 in stages, len(owner) - 1 in stages


def parameters(
    job: Job, plan: Plan, shapes: list[tuple[TransformerConfig, int]], first: bool, last: bool
) -> Parameters:
    """Return the parameters of a rank with these layers; a tied embedding lies on the first and the last stage."""
    c, held = job.config, NONE
    for part, here in (
        (embedding(c, plan), first or (last and c.tied)),
        (head(c, plan), last),
        *((layer(shape, plan), count) for shape, count in shapes),
    ):
        held += part.times(here)
    return held


def of_rank(job: Job, plan: Plan, rank: int) -> Memory:
    """Return the memory of a rank of the pipeline."""
    c, code, e = job.config, job.code, job.number_bytes
    shapes, first, last = layers_of(job, plan, rank)
    held = parameters(job, plan, shapes, first, last)
    in_flight = held_chunks(plan, plan.micro_batches(job.batch), rank) / plan.chunks
    tokens = plan.micro_batch * job.sequence / plan.sp
    kept = in_flight * sum(n * layer_bytes(job, plan, shape) for shape, n in shapes)
    if plan.kept == "inputs":  # while one layer is computed again it keeps everything
        kept += max(layer_bytes(job, replace(plan, kept="all"), shape) for shape, _ in shapes)
    kept += first * 8 * tokens * in_flight  # token numbers
    # input and result of the head's norm, of its dense layer, and of the embeddings' norm
    normed = last * (4 if c.masked_head else 2) + first * in_flight * (2 if c.post_norm else 0)
    kept += normed * tokens * c.width * e / (plan.tp if plan.sequence_parallel else 1)
    logits = last * tokens * c.vocabulary / plan.tp * code.logit_bytes

    whole = held.dense + held.experts
    shards = held.dense / plan.holders[0] + held.experts / plan.holders[1]
    one = max((layer(shape, plan) for shape, _ in shapes), key=lambda p: p.dense + p.experts)
    passing = e * (one.dense + (one.experts * plan.expert_ranks[0] / c.experts if c.experts else 0))
    gradients = code.gradient_bytes * (shards if plan.zero >= 2 else whole)
    in_buffers = code.keeps_gradients or plan.holders[0] > 1  # in a buffer, which stays
    if not in_buffers and in_flight == plan.micro_batches(job.batch):
        # the larger of two moments: before the first backward pass, without gradients; after it, a micro-batch less
        gradients -= min(gradients, kept / in_flight)
    gathered = 2 * code.weight_bytes * (one.dense + one.experts) if plan.zero == 3 else 0
    return Memory(
        code.weight_bytes * (shards if plan.zero == 3 else whole),
        gradients,
        code.state_bytes * (shards if plan.zero >= 1 else whole),
        kept,
        logits + passing + gathered,
    )


def held_chunks(plan: Plan, micro_batches: int, rank: int) -> float:
    """Return how many micro-batches' chunks a rank holds at once."""
    held = KINDS[plan.schedule].holds(rank, plan.pp, micro_batches, plan.chunks)
    return micro_batches * plan.chunks if held is None else held


def layer_bytes(job: Job, plan: Plan, c: TransformerConfig) -> float:
    """Return the bytes that a layer of shape `c` keeps of one micro-batch."""
    code, e, tp, S = job.code, job.number_bytes, plan.tp, job.sequence
    tokens = plan.micro_batch * S / plan.sp
    between = tokens / (tp if plan.sequence_parallel else 1)
    if plan.kept == "inputs":
        return between * c.width * e
    H, G, (K, V) = c.heads / tp, max(1.0, c.kv_heads / tp), head_widths(c)
    numbers = 4 * between * c.width  # inputs of the norms, and what they return
    if c.norm == "rmsnorm" and not code.fused_norm:
        numbers += 2 * between * c.width
    if not code.gathers_again:
        numbers += 2 * (tokens - between) * c.width
    numbers += tokens * (H * (K + V) + G * (K + V))  # queries, keys, values and the result
    if c.positions == "rotary" and not code.fused_rotary:
        numbers += tokens * H * V
    for w in projections(c):
        numbers += (
            tokens * 2 * w.columns if not w.split else 0
        )  # latent vectors, before and behind their norm
    other = 4 * tokens * H if code.fused_attention else 0.0  # logarithm of the sum of exponentials
    if not code.fused_attention and plan.kept == "all":
        table = plan.micro_batch * H * (S / plan.sp) * S
        numbers += table * (2 if code.dropout else 1)
        other += table if code.dropout else 0
    if code.dropout:
        other += 2 * between * c.width  # masks
    return numbers * e + other + mlp_bytes(c, plan, code, tokens, between)


def mlp_bytes(c: TransformerConfig, plan: Plan, code: Code, tokens: float, between: float) -> float:
    """Return the bytes that a layer's MLP or experts keep of one micro-batch, without the norm."""
    e, inner = SIZES[code.dtype], 2 if c.mlp == "gelu" else 3 if code.fused_activation else 4
    if not c.experts:
        return tokens * inner * c.mlp_width / plan.tp * e
    etp = plan.expert_ranks[1]
    copies = c.experts_per_token * (c.capacity_factor or 1.0)
    rows = between * copies * (etp if plan.sequence_parallel else 1)
    numbers = rows * (inner * c.mlp_width / etp + c.width)  # rows sent here, and inside the experts
    numbers += between * copies * c.width  # results before they are weighted
    numbers += tokens * inner * c.shared_experts * c.mlp_width / plan.tp
    return numbers * e + 4 * between * c.experts
