"""Predicted MFU of mixtures of experts against "MoE Parallel Folding" (arXiv:2504.14960), tables 3 to 5.

    rows = read_moe()
    in_order(pairs(rows))       -> share of pairs of runs that the planner ranks as measured

How many stages a rank has is not published: CHUNKS, where pp is above 1. Experts that the paper puts on ranks of the
sequence as well lie on those of samples alone, where nothing is folded. Table 5 has sequences of up to 131,072 tokens.
The planner counts all scores of attention, of which a causal kernel computes half: the longer the sequence, the further
the predicted MFU is below the measured one.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from rich.table import Table

from common.launch.terminal import make_table
from common.models.configs import mixtral

from plan_job import Job
from plan_layout import CODES, Plan
from plan_machine import read_machine
from plan_models import MODELS
from plan_time import predict

FILE = Path(__file__).with_name("published") / "moe-folding.csv"
CHUNKS = 2
MIXTRAL = MODELS["mixtral-8x22b"]
QWEN2 = mixtral(
    64, layers=28, width=3584, heads=28, kv_heads=4, mlp_width=2560, sequence=131072, vocabulary=151936
)
LLAMA3 = mixtral(
    8, layers=80, width=8192, heads=64, kv_heads=8, mlp_width=28672, sequence=131072, vocabulary=128256
)
SHAPES = {
    "Mixtral-8x22B": MIXTRAL,
    "Mixtral-8x22B-G8T8": replace(MIXTRAL, experts=64, experts_per_token=8, mlp_width=2048),
    "Qwen2-57B-A14B": replace(QWEN2, experts_per_token=8, shared_experts=8),
    "Llama3-8x70B": LLAMA3,
}
Pair = tuple["Run", "Run"]


@dataclass(frozen=True)
class Run:
    """A measured run: its table in the paper, model and method, and the share of the peak that it reached."""

    table: int
    model: str
    method: str
    gpus: int
    sequence: int
    job: Job
    plan: Plan
    mfu: float

    @property
    def predicted(self) -> float:
        """Predicted share of the peak."""
        return _predicted(self.job, self.plan)

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.mfu - 1


@lru_cache(maxsize=1024)
def _predicted(job: Job, plan: Plan) -> float:
    return predict(job, plan).mfu


@lru_cache(maxsize=1)
def read_moe() -> tuple[Run, ...]:
    """Return the paper's runs."""
    machine, code = read_machine("h100"), CODES["megatron-core"]
    found = []
    for x in csv.DictReader(line for line in FILE.read_text().splitlines() if not line.startswith("#")):
        c, gpus, S = SHAPES[x["model"]], int(x["gpus"]), int(x["sequence"])
        job = Job(c, code, machine, int(x["batch"]), S)
        found.append(
            Run(int(x["table"]), x["model"], x["method"], gpus, S, job, _plan(x), float(x["mfu"]) / 100)
        )
    return tuple(found)


def _plan(x: dict[str, str]) -> Plan:
    """Return the plan of a row. A blank cell of pp or ep is 1, that of etp what the method implies."""
    gpus, sp, tp, pp, ep = (int(x[key] or 1) for key in ("gpus", "sp", "tp", "pp", "ep"))
    samples = gpus // (pp * tp * sp)
    folded = "Folding" in x["method"]
    axis = 1 if folded else min(ep, samples)
    chunks = min(CHUNKS, SHAPES[x["model"]].layers // pp) if pp > 1 else 1
    return Plan(
        *(pp, samples // axis, axis, sp, tp),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        zero=3 if "FSDP" in x["method"] else 1,
        sequence_parallel=tp > 1,
        folded=ep if folded else 1,
    )


def pairs(runs: Iterable[Run]) -> list[Pair]:
    """Return the pairs that one would choose between: runs of a table with one model and sequence, and either as many
    GPUs or the same method, that did not measure the same."""
    return [
        (a, b)
        for a, b in itertools.combinations(runs, 2)
        if (a.table, a.model, a.sequence) == (b.table, b.model, b.sequence)
        and (a.gpus == b.gpus or a.method == b.method)
        and a.mfu != b.mfu
    ]


def methods(runs: Iterable[Run], one: str, other: str) -> list[Pair]:
    """Return the pairs of runs by two methods that differ in nothing else."""
    return [
        (a, b) if a.method == one else (b, a) for a, b in pairs(runs) if {a.method, b.method} == {one, other}
    ]


def slopes(runs: Iterable[Run]) -> list[Pair]:
    """Return the pairs of runs on 1024 and on 128 GPUs with the same method and batch."""
    return [
        (b, a) if b.gpus > a.gpus else (a, b)
        for a, b in pairs(runs)
        if a.method == b.method and {a.gpus, b.gpus} == {128, 1024}
    ]


def in_order(found: Sequence[Pair]) -> float:
    """Return the share of pairs of which the planner says the same run to be the faster."""
    return statistics.mean((a.mfu > b.mfu) == (a.predicted > b.predicted) for a, b in found)


def moe_tables(runs: Sequence[Run]) -> Iterator[Table]:
    """Yield the table of errors by method, and that of pairs in the right order."""
    heads = ["method", ">rows", ">mean |error|", ">bias", ">largest"]
    made = make_table("predicted against measured MFU (arXiv:2504.14960)", heads)
    for name in ("all", *dict.fromkeys(run.method for run in runs)):
        errors = [run.error for run in runs if name in ("all", run.method)]
        sizes = [abs(error) for error in errors]
        cells = f"{statistics.mean(sizes):.1%}", f"{statistics.mean(errors):+.1%}", f"{max(sizes):.0%}"
        made.add_row(name, str(len(errors)), *cells)
    yield made
    heads = [">pairs", ">in order", ">measured ratio", ">predicted", ">mean |error| of the ratio"]
    made = make_table("pairs of these runs: which is the faster, and by how much", ["pairs of", *heads])
    for name, found in {
        "all comparable": pairs(runs),
        "Folding / MCore": methods(runs, "MCore+Folding", "MCore"),
        "FSDP+EP / MCore": methods(runs, "FSDP+EP", "MCore"),
        "1024 / 128 GPUs": slopes(runs),
    }.items():
        more: list[str] = []
        if name != "all comparable":
            ratios = [(a.mfu / b.mfu, a.predicted / b.predicted) for a, b in found]
            more = [f"{statistics.geometric_mean(some):.2f}" for some in zip(*ratios, strict=True)]
            more.append(f"{statistics.mean(abs(predicted / real - 1) for real, predicted in ratios):.1%}")
        made.add_row(name, str(len(found)), f"{in_order(found):.1%}", *more)
    yield made
