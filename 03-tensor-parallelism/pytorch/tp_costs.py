"""Bytes that a rank sends in a step of chapter 03's lessons, by formula; nothing here starts a rank.

B batch  S sequence  D width  n ranks
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from common.comm import Group, padded
from common.lesson.training import TrainingOptions
from common.models.transformer import Transformer


def column_bytes(name: str, model: Transformer, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes of columns alone: results are gathered, the gradients of inputs all-reduced."""
    c, size = model.config, next(model.parameters()).element_size()
    columns = [c.heads * c.head_width, *[c.kv_heads * c.head_width] * 2, c.mlp_width]
    columns += [c.mlp_width] if c.mlp == "swiglu" else []
    gathered = sum(padded(number, group.size) for number in columns)
    numbers = c.layers * (gathered + 2 * len(columns) * c.width)
    return Fraction((group.size - 1) * o.batch * o.sequence * numbers * size, group.size)


def row_bytes(name: str, model: Transformer, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes of rows.

    scattered: two sums forward, the gradients of two inputs gathered. column-row: one sum in each pass, and
    one more backward for the gate of SwiGLU.
    """
    c, size = model.config, next(model.parameters()).element_size()
    if name == "scattered":
        numbers = 2 * 2 * c.width + padded(c.width, group.size) + padded(c.mlp_width, group.size)
    else:
        numbers = 2 * c.width * (3 if c.mlp == "swiglu" else 2)
    return Fraction((group.size - 1) * c.layers * o.batch * o.sequence * numbers * size, group.size)


def vocabulary_bytes(name: str, model: Transformer, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes of a split vocabulary: embedding, gradient of the head's input, and loss."""
    c, n, size = model.config, group.size, next(model.parameters()).element_size()
    loss = padded(c.vocabulary, n) if name == "gathered" else 2 * 3
    return Fraction((n - 1) * o.batch * o.sequence * (2 * 2 * c.width + loss) * size, n)


def megatron_bytes(name: str, model: Transformer, group: Group, o: Any) -> Fraction:
    """Return the bytes of the whole Transformer, in each version of tp_megatron, tp_overlap and tp_dtensor."""
    c, n, size = model.config, group.size, next(model.parameters()).element_size()
    outside = name in ("sequence-parallel", "whole", "pieces")  # the others leave norms and residuals whole
    length = padded(o.sequence, n) if outside else o.sequence
    numbers = o.batch * length * c.width * (4 * c.layers + 2)
    numbers += 3 * o.batch * o.sequence  # the loss
    if c.kv_heads % n:  # the gradients of weights that ranks share
        times = min(o.micro_batches, o.batch)
        numbers += times * c.layers * 2 * c.kv_heads * c.head_width * (c.width + c.bias)
    if outside:  # the gradients that are partial
        norm = c.width * (2 if c.norm == "layernorm" else 1)
        numbers += (2 * c.layers + 1 + c.post_norm) * norm + 2 * c.layers * c.width * c.bias
        numbers += c.width * (c.sequence * (c.positions == "learned") + c.token_types)
        numbers += c.width * (c.width + c.bias) * c.masked_head
    return Fraction(2 * (n - 1) * numbers * size, n)
