"""Bytes that the lessons of chapter 04 send, by formula; nothing here starts a rank.

B batch  s a rank's tokens  H query heads  G key-value heads  K width of a head  n ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from torch import nn

from common.comm import Group
from common.lesson.comparison import Formula
from common.lesson.runner import DTYPES
from common.models.configs import config

from sp_options import GridOptions, SequenceOptions


def shape_bytes(o: SequenceOptions, ranks: int) -> tuple[int, int]:
    """Return the bytes of a rank's queries (B s H K numbers) and keys (B s G K), for the whole batch."""
    c, size = config(o.model), DTYPES[o.dtype].itemsize
    tokens = o.batch * o.sequence // ranks
    return tokens * c.heads * c.head_width * size, tokens * c.kv_heads * c.head_width * size


def copies(kv_heads: int, ranks: int) -> int:
    """Return how often Ulysses repeats each key-value head, so that all ranks have equally many."""
    return math.lcm(kv_heads, ranks) // kv_heads


def allgather_bytes(o: SequenceOptions, ranks: int) -> int:
    """Return the bytes a rank sends for a layer's attention: keys and values, and their gradients."""
    _, keys = shape_bytes(o, ranks)
    return 2 * (ranks - 1) * 2 * keys


def ulysses_bytes(o: SequenceOptions, ranks: int) -> int:
    """Return the bytes a rank sends for a layer's attention: q, k, v, o without its own share, twice."""
    queries, keys = shape_bytes(o, ranks)
    exchanged = 2 * queries + 2 * keys * copies(config(o.model).kv_heads, ranks)
    return 2 * (ranks - 1) * exchanged // ranks


def ring_bytes(o: SequenceOptions, ranks: int) -> int:
    """Return a rank's bytes for a layer's attention: keys and values in both passes, their gradients once."""
    _, keys = shape_bytes(o, ranks)
    return 3 * (ranks - 1) * 2 * keys


def grid_bytes(o: GridOptions, ranks: int) -> int:
    """Return the bytes a rank sends for a layer's attention in both passes, along its row and its column."""
    queries, keys = shape_bytes(o, ranks)
    keys *= copies(config(o.model).kv_heads, o.inner)
    along_the_row = 2 * (o.inner - 1) * (2 * queries + 2 * keys) // o.inner
    return along_the_row + 3 * (ranks // o.inner - 1) * 2 * keys


def step_bytes(attention: Callable[[Any, int], int]) -> Formula:
    """Return the formula of a step: `attention` for each layer; 2(n-1)/n of gradients, loss, target count (8)."""

    def formula(name: str, model: nn.Module, group: Group, o: SequenceOptions) -> Fraction:
        numbers, size = sum(p.numel() for p in model.parameters()) + 1, DTYPES[o.dtype].itemsize
        summed = Fraction(2 * (group.size - 1) * (numbers * size + 8), group.size)
        return config(o.model).layers * Fraction(attention(o, group.size)) + summed

    return formula
