"""Bytes that the lessons of chapter 04 send, by formula; nothing here starts a rank.

B batch  s a rank's tokens  H query heads  G key-value heads  K width of a head  n ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rich.table import Table
from torch import nn

from common.comm import Group
from common.comm.ledger import show_bytes
from common.lesson.comparison import Formula
from common.lesson.runner import DTYPES

from sp_training import SequenceOptions

Bytes = Callable[[Any, int], int]  # of (the options, the number of ranks)


def sizes(o: SequenceOptions, ranks: int) -> tuple[int, int, int]:
    """Return the bytes of a rank's queries (B s H K numbers) and keys (B s G K), and G.

    They are the model's for the whole batch, or with --benchmark those of the attention that is timed alone.
    """
    if o.benchmark:
        tokens, heads, width = o.shape
        kv_heads = heads
    else:
        c, tokens = o.model_config(), o.batch * o.sequence
        heads, kv_heads, width = c.heads, c.kv_heads, c.head_width
    of_head = tokens // ranks * width * DTYPES[o.dtype].itemsize
    return of_head * heads, of_head * kv_heads, kv_heads


def copies(kv_heads: int, ranks: int) -> int:
    """Return how often Ulysses repeats each key-value head, so that all ranks have equally many."""
    return math.lcm(kv_heads, ranks) // kv_heads


def allgather_bytes(o: SequenceOptions, ranks: int) -> int:
    """Return the bytes a rank sends for a layer's attention: keys and values, and their gradients."""
    _, keys, _ = sizes(o, ranks)
    return 2 * (ranks - 1) * 2 * keys


def ring_bytes(o: SequenceOptions, ranks: int) -> int:
    """Return a rank's bytes for a layer's attention: keys and values in both passes, their gradients once."""
    return grid_bytes(o, ranks, 1)


def ulysses_bytes(o: SequenceOptions, ranks: int) -> int:
    """Return the bytes a rank sends for a layer's attention: q, k, v, o without its own share, twice."""
    return grid_bytes(o, ranks, ranks)


def grid_bytes(o: SequenceOptions, ranks: int, inner: int) -> int:
    """Return the bytes a rank sends for a layer's attention along its row of `inner` ranks and its column.

    The row swaps q, k, v and o without its own share in both passes; the column sends k and v in both passes,
    their gradients once.
    """
    queries, keys, kv_heads = sizes(o, ranks)
    keys *= copies(kv_heads, inner)
    along_the_row = 2 * (inner - 1) * (2 * queries + 2 * keys) // inner
    return along_the_row + 3 * (ranks // inner - 1) * 2 * keys


def step_bytes(attention: Bytes) -> Formula:
    """Return the formula of a step: `attention` for each layer; 2(n-1)/n of gradients, loss, target count (8)."""

    def formula(name: str, model: nn.Module, group: Group, o: SequenceOptions) -> Fraction:
        numbers, size = sum(p.numel() for p in model.parameters()) + 1, DTYPES[o.dtype].itemsize
        summed = Fraction(2 * (group.size - 1) * (numbers * size + 8), group.size)
        return o.model_config().layers * Fraction(attention(o, group.size)) + summed

    return formula


def bytes_table(o: SequenceOptions) -> Table:
    """Return a table of the bytes of each strategy for a layer's attention, by formula, for 2 to 16 ranks."""
    heads = o.model_config().heads
    title = (
        f"bytes a rank sends for a layer's attention: {o.model}, {o.batch} x {o.sequence} tokens, {o.dtype}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("ranks", "allgather", "ring, zigzag", "ulysses"):
        table.add_column(column, justify="right")
    for n in (n for n in (2, 4, 8, 16) if o.sequence % n == 0):
        ours = show_bytes(ulysses_bytes(o, n)) if heads % n == 0 else f"no: {heads} heads"
        table.add_row(str(n), show_bytes(allgather_bytes(o, n)), show_bytes(ring_bytes(o, n)), ours)
    return table
