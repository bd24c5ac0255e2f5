"""Sizes of a model: parameters of each part, and the operations of a token, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from common.models.configs import TransformerConfig

from plan_layout import Plan


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a layer without its experts, of a layer's experts, of the embedding and of the head."""

    layer: float
    experts: float
    embedding: float
    head: float


def norm(c: TransformerConfig) -> int:
    """Return the parameters of one norm."""
    return c.width * (2 if c.norm == "layernorm" else 1)


def matrices(c: TransformerConfig, width: int) -> int:
    """Return the weights of one MLP of this inner width, without biases."""
    return (3 if c.mlp == "swiglu" else 2) * c.width * width


def whole(c: TransformerConfig) -> Parameters:
    """Return the parameters of the whole model."""
    D, K = c.width, c.head_width
    attention = 2 * D * c.heads * K + 2 * D * c.kv_heads * K
    if c.bias:
        attention += D + (c.heads + 2 * c.kv_heads) * K
    mlp_bias = c.mlp_width + D if c.bias else 0
    layer, experts = attention + 2 * norm(c), 0
    if c.experts:
        layer += c.experts * D + matrices(c, c.shared_experts * c.mlp_width)
        experts = c.experts * (matrices(c, c.mlp_width) + mlp_bias)
    else:
        layer += matrices(c, c.mlp_width) + mlp_bias
    positions = c.sequence * D if c.positions == "learned" else 0
    head = norm(c) + (0 if c.tied else c.vocabulary * D)
    return Parameters(layer, experts, c.vocabulary * D + positions, head)


def of_rank(c: TransformerConfig, plan: Plan) -> Parameters:
    """Return the parameters that a rank holds of each part of which it holds any; norms counted as split over tp."""
    p, etp = whole(c), plan.tp if plan.expert_tp is None else plan.expert_tp
    return Parameters(p.layer / plan.tp, p.experts / plan.ep / etp, p.embedding / plan.tp, p.head / plan.tp)


def total(c: TransformerConfig) -> float:
    """Return the parameters of the model."""
    p = whole(c)
    return c.layers * (p.layer + p.experts) + p.embedding + p.head


def flops_per_token(c: TransformerConfig, sequence: int) -> float:
    """Return a token's operations, forward and backward, as Transformer.flops_per_token counts them."""
    D, K = c.width, c.head_width
    active = 2 * D * c.heads * K + 2 * D * c.kv_heads * K
    if c.experts:
        active += c.experts * D + (c.experts_per_token + c.shared_experts) * matrices(c, c.mlp_width)
    else:
        active += matrices(c, c.mlp_width)
    return 6 * (c.layers * active + c.vocabulary * D) + 12 * c.layers * sequence * D
