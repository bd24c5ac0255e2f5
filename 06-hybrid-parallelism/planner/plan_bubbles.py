"""Bubbles of simulated schedules against those of a paper: Qi et al., "Zero bubble pipeline parallelism", tables 4, 5.

    rows = read_bubbles()
    bubble(rows[0], "1F1B")     -> share of a step in which a rank waits, with the paper's profiled times

The paper's rates come from profiled times of a forward, of the halves of backward, and of a message, the same for all
stages: the first and the last have one layer fewer, in whose place stand embedding and head. The time of a step is that
of one rank, from its first computation to its last. Beside the rates stand measured samples per second.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from rich.table import Table

from common.launch.terminal import make_table

from pp_kind import Kind
from pp_schedule import Schedule
from pp_schedules import KINDS
from pp_simulator import simulate
from pp_zero_bubble import zb_h1

FILE = Path(__file__).with_name("published") / "zero-bubble.csv"


ZB_H2 = Kind(
    "zb-h2", partial(zb_h1, times=2), bubble=lambda p, M, v: None, holds=lambda r, p, M, v: min(M, 2 * p - 1)
)
SIMULATED = {
    "1F1B": KINDS["1f1b"],
    "1F1B-I": KINDS["interleaved"],
    "ZB-H1": KINDS["zb-h1"],
    "ZB-H2": ZB_H2,
}
# schedules with measured throughput -> those whose bubble they have. ZB-2p is the result of a search, which this
# course does not repeat; ZB-H2 holds as many micro-batches and waits longer
MEASURED = {"ZB-1p": "ZB-H1", "ZB-2p": "ZB-H2", "1F1B-I": "1F1B-I"}


@dataclass(frozen=True)
class Pipeline:
    """A model on `ranks` ranks: times in ms of a rank's passes and of a message; rates and samples/s by schedule."""

    model: str
    ranks: int
    micro_batches: int
    chunks: int
    """Stages of a rank in 1F1B-I, of one layer each."""
    forward: float
    inputs: float
    weights: float
    message: float
    rates: tuple[tuple[str, float], ...]
    samples: tuple[tuple[str, float], ...]


def read_bubbles() -> list[Pipeline]:
    """Return the paper's rows."""
    rows = csv.DictReader(line for line in FILE.read_text().splitlines() if not line.startswith("#"))
    return [
        Pipeline(
            *(x["model"], int(x["ranks"]), int(x["micro_batches"]), int(x["chunks"])),
            float(x["forward"]),
            float(x["inputs"]),
            float(x["weights"]),
            float(x["message"]),
            _columns(x, "bubble "),
            _columns(x, "samples "),
        )
        for x in rows
    ]


def _columns(x: dict[str, str], word: str) -> tuple[tuple[str, float], ...]:
    """Return the numbers in columns that begin with a word, by the rest of the columns' names."""
    return tuple((key.removeprefix(word), float(x[key])) for key in x if key.startswith(word))


@lru_cache(maxsize=256)
def bubble(row: Pipeline, name: str) -> float:
    """Return the share of a step in which the rank that takes longest waits, under a schedule of SIMULATED."""
    kind, p, M = SIMULATED[name], row.ranks, row.micro_batches
    owner = kind.owner(p, row.chunks)
    mine = [tuple(stage for stage, of in enumerate(owner) if of == rank) for rank in range(p)]
    lists = tuple(tuple(kind.generator(of_rank, p, M)) for of_rank in mine)
    each = {"F": row.forward, "I": row.inputs, "W": row.weights, "B": row.inputs + row.weights}
    chunks = len(owner) // p
    line = simulate(Schedule(name, M, owner, lists), lambda i: each[i.op] / chunks, row.message)
    begins, ends = [float("inf")] * p, [0.0] * p
    for e in line.events:
        begins[e.rank] = min(begins[e.rank], float(e.start))
        ends[e.rank] = max(ends[e.rank], float(e.end))
    step = max(end - begin for begin, end in zip(begins, ends, strict=True))
    return 1 - M * (row.forward + row.inputs + row.weights) / step


def formula(row: Pipeline) -> float:
    """Return the bubble of 1F1B with equal stages and messages that take no time."""
    return (row.ranks - 1) / (row.micro_batches + row.ranks - 1)


def excess(row: Pipeline, name: str, simulated: bool = True) -> float:
    """Return by how much bubbles predict a larger speed-up over 1F1B than was measured, relative to that one.

    simulated: by the simulator's bubbles; otherwise by the paper's rates.
    """
    samples, rates = dict(row.samples), dict(row.rates)
    one, base = (
        (bubble(row, MEASURED[name]), bubble(row, "1F1B")) if simulated else (rates[name], rates["1F1B"])
    )
    return (1 - one) / (1 - base) / (samples[name] / samples["1F1B"]) - 1


def bubble_tables(rows: Sequence[Pipeline]) -> Iterator[Table]:
    """Yield the table of bubbles, and that of speed-ups over 1F1B."""
    heads = ["schedule", ">rows", ">mean rate of the paper", ">simulated minus paper", ">from", ">to"]
    made = make_table("bubble in percent of a step, and difference in points (arXiv:2401.10241)", heads)
    for name in SIMULATED:
        rates = [dict(row.rates)[name] for row in rows]
        off = [bubble(row, name) - rate for row, rate in zip(rows, rates, strict=True)]
        made.add_row(name, str(len(rows)), f"{100 * statistics.mean(rates):.2f}", *_spread(off, 2))
    off = [bubble(row, "1F1B") - formula(row) for row in rows]
    rates = [formula(row) for row in rows]
    made.add_row(
        "1F1B minus (p-1)/(m+p-1)", str(len(rows)), f"{100 * statistics.mean(rates):.2f}", *_spread(off, 2)
    )
    yield made
    heads = ["schedule", "bubbles of", ">rows", ">over-prediction in %", ">from", ">to"]
    made = make_table("speed-up over 1F1B: predicted against measured (arXiv:2401.10241)", heads)
    for name, kind in MEASURED.items():
        for simulated in (True, False):
            off = [excess(row, name, simulated) for row in rows]
            of = f"simulated {kind}" if simulated else "the paper"
            made.add_row(name, of, str(len(rows)), *_spread(off, 1))
    yield made


def _spread(shares: Sequence[float], digits: int) -> Iterator[str]:
    """Yield the mean, the smallest and the largest of these shares, in percent."""
    for of in (statistics.mean, min, max):
        yield f"{100 * round(of(shares), digits + 2) + 0.0:+.{digits}f}"
