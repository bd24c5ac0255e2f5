"""Bytes that the lessons of chapter 05 send, by formula; nothing here starts a rank.

D width  E experts, e of this rank  C capacity  n ranks
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

from torch import nn

from common.comm import Group, sizes_of
from common.data.text import rank_slice
from common.lesson.runner import DTYPES


class Exchange(Protocol):
    """Rows that a layer's experts exchanged, by call."""

    rows_sent: list[int]
    rows_received: list[int]
    send: list[int]


class RoutedBytes:
    """Bytes by formula of runs that route tokens; without a capacity they depend on the rows that were exchanged.

    exchanges: of each version, by layer.
    """

    def __init__(self) -> None:
        self.exchanges: dict[str, Sequence[Exchange]] = {}

    def always(self, model: nn.Module, group: Group, o: Any) -> Fraction:
        """Return a step's bytes without those of experts: dense gradients, loss, number of targets."""
        dense = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name)
        return Fraction(2 * (group.size - 1) * ((dense + 1) * DTYPES[o.dtype].itemsize + 8), group.size)

    def steps_bytes(self, name: str, model: nn.Module, group: Group, o: Any) -> list[Fraction]:
        """Return the bytes this rank sends in each step so far; with `capacity` one number for all steps."""
        c, n, size = o.model_config(), group.size, DTYPES[o.dtype].itemsize
        e = sizes_of(c.experts, n)[group.rank]
        always = self.always(model, group, o) + o.micro_batches * c.layers * 8 * (c.experts - e)  # the counts
        if name == "capacity":
            C = math.ceil(o.capacity_factor * c.experts_per_token * o.sequence / c.experts)
            lo, hi = rank_slice(o.batch, group.rank, n)
            rows = C * ((c.experts - e) * (hi - lo) + e * (o.batch - (hi - lo)))
            return [always + c.layers * 2 * rows * c.width * size]
        of_calls = [
            sum(exchange.rows_sent[call] + exchange.rows_received[call] for exchange in self.exchanges[name])
            for call in range(len(self.exchanges[name][0].rows_sent))
        ]
        of_steps = [sum(of_calls[t : t + o.micro_batches]) for t in range(0, len(of_calls), o.micro_batches)]
        return [always + 2 * rows * c.width * size for rows in of_steps]

    def step_bytes(self, name: str, model: nn.Module, group: Group, o: Any) -> Fraction:
        """Return the bytes this rank sends in a step: the median of the last `o.steps`."""
        return Fraction(statistics.median(self.steps_bytes(name, model, group, o)[-o.steps :]))

    def run_bytes(self, name: str, model: nn.Module, group: Group, o: Any) -> Fraction:
        """Return the bytes of `o.steps` steps of this rank, each with an all-reduced norm of 8 bytes."""
        of_steps = self.steps_bytes(name, model, group, o)
        of_steps = of_steps * o.steps if len(of_steps) == 1 else of_steps
        return sum(of_steps, o.steps * Fraction(2 * (group.size - 1) * 8, group.size))
