"""Bytes that the lessons of chapter 05 send, by formula, and the table of the rows that they exchanged.

D width  E experts, e of this rank  C capacity  n ranks
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group, sizes_of
from common.comm.ledger import show_bytes
from common.data.text import rank_slice
from common.launch.runtime import Runtime
from common.lesson.runner import DTYPES


class Exchange(Protocol):
    """Rows that a layer's experts exchanged, by call."""

    rows_sent: list[int]
    rows_received: list[int]
    last_sent: list[int]


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


class SlicedBytes(RoutedBytes):
    """Bytes by formula of ep_tensor_parallel.py."""

    def steps_bytes(self, name: str, model: nn.Module, group: Group, o: Any) -> list[Fraction]:
        """Return the bytes this rank sends in each step; with slices one number for all steps."""
        if name == "experts":
            return super().steps_bytes(name, model, group, o)
        c, n, size = o.model_config(), group.size, DTYPES[o.dtype].itemsize
        always = self.always(model, group, o)
        return [always + c.layers * 4 * (n - 1) * o.batch * o.sequence // n * c.width * size]


class BytesInPieces(RoutedBytes):
    """Bytes by formula of ep_overlap.py."""

    def steps_bytes(self, name: str, model: nn.Module, group: Group, o: Any) -> list[Fraction]:
        """Return the bytes this rank sends in each step: with `pieces`, P counts per expert instead of 1."""
        c, others = o.model_config(), o.model_config().experts
        others -= sizes_of(c.experts, group.size)[group.rank]
        more = o.micro_batches * c.layers * 8 * others * (o.pieces - 1) if name == "pieces" else 0
        return [sent + more for sent in super().steps_bytes(name, model, group, o)]


class BalancedBytes(RoutedBytes):
    """Bytes by formula of ep_load_balance.py, and the load of each step, [L, E], of each version."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: dict[str, list[Tensor]] = {}

    def steps_bytes(self, name: str, model: nn.Module, group: Group, o: Any) -> list[Fraction]:
        """Return the bytes without balance plus those of the counts: 2 E integers per layer, all-reduced."""
        c = o.model_config()
        counts = Fraction(2 * (group.size - 1) * c.layers * 2 * c.experts * 8, group.size)
        return [sent + counts for sent in super().steps_bytes(name, model, group, o)]


def rows_table(rt: Runtime, o: Any, sent: RoutedBytes) -> Table:
    """Return a table of the rows sent from rank to rank in the first layer, in the last forward pass."""
    table = Table(title="rows of the last pass, first layer: from rank (down) to rank", title_justify="left")
    for column in ("version", "from", *map(str, range(rt.world_size)), "bytes"):
        table.add_column(column, justify="left" if column == "version" else "right")
    for name, exchanges in sent.exchanges.items():
        for rank, send in enumerate(comm.everyones(exchanges[0].last_sent, rt.world)):
            away = sum(send) - send[rank]
            size = show_bytes(away * o.model_config().width * DTYPES[o.dtype].itemsize)
            table.add_row(name if rank == 0 else "", str(rank), *map(str, send), size)
    return table
