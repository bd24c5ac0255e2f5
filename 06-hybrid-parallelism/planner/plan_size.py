"""Sizes of a model: parameters of each part, and the operations of a token, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass

from common.models.configs import TransformerConfig

from plan_layout import Plan
from plan_models import head_widths, layer_shapes, projections


@dataclass(frozen=True)
class Parameters:
    """Parameters of one layer or one end of the model: those of experts, and all others."""

    dense: float
    experts: float = 0.0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    def times(self, count: int) -> Parameters:
        """Return the parameters of so many such parts."""
        return Parameters(count * self.dense, count * self.experts)


NONE = Parameters(0)


def _norm(c: TransformerConfig) -> int:
    return c.width * (2 if c.norm == "layernorm" else 1)


def _mlp(c: TransformerConfig, width: float) -> float:
    """Return the parameters of an MLP with this part of its inner width."""
    bias = width + c.width if c.bias else 0
    return (3 if c.mlp == "swiglu" else 2) * c.width * width + bias


def layer(c: TransformerConfig, plan: Plan | None = None) -> Parameters:
    """Return the parameters of a layer, or of a rank's part of it. Norms and biases count as split over tp."""
    p = plan or Plan()
    out = c.heads * head_widths(c)[1] * c.width
    split = out + sum(w.inner * w.columns for w in projections(c) if w.split)
    whole = sum(w.inner * w.columns for w in projections(c) if not w.split)
    if c.bias:
        split += c.width + sum(w.columns for w in projections(c))
    dense = whole + (split + 2 * _norm(c)) / p.tp
    if not c.experts:
        return Parameters(dense + _mlp(c, c.mlp_width) / p.tp)
    dense += c.experts * c.width + _mlp(c, c.shared_experts * c.mlp_width) / p.tp * bool(c.shared_experts)
    ways, parts = p.expert_ranks
    return Parameters(dense, c.experts * _mlp(c, c.mlp_width) / ways / parts)


def embedding(c: TransformerConfig, plan: Plan | None = None) -> Parameters:
    """Return the parameters of the embeddings, or of a rank's part of them."""
    rows = c.vocabulary + c.token_types + (c.sequence if c.positions == "learned" else 0)
    return Parameters((rows * c.width + (_norm(c) if c.post_norm else 0)) / (plan or Plan()).tp)


def head(c: TransformerConfig, plan: Plan | None = None) -> Parameters:
    """Return the parameters behind the last layer, or a rank's part: norm and head, if that is not the embedding."""
    numbers = _norm(c) + (0 if c.tied else c.vocabulary * c.width)
    if c.masked_head:
        numbers += c.width * (c.width + c.bias) + c.vocabulary
    return Parameters(numbers / (plan or Plan()).tp)


def total(c: TransformerConfig) -> float:
    """Return the parameters of the model."""
    parts = sum((layer(shape) for shape in layer_shapes(c)), embedding(c) + head(c))
    return parts.dense + parts.experts


def flops_per_token(c: TransformerConfig, sequence: int) -> float:
    """Return a token's operations, forward and backward, as Transformer.flops_per_token counts them."""
    keys, values = head_widths(c)
    matrices = c.vocabulary * c.width + (c.width**2 if c.masked_head else 0)
    for shape in layer_shapes(c):
        matrices += c.heads * values * c.width + sum(w.inner * w.columns for w in projections(c))
        active = (shape.experts_per_token + shape.shared_experts) if shape.experts else 1
        matrices += (
            active * (3 if c.mlp == "swiglu" else 2) * c.width * shape.mlp_width + shape.experts * c.width
        )
    return 6 * matrices + 6 * c.layers * sequence * c.heads * (keys + values)
