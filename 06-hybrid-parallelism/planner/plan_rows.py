"""Measured training steps: the rows of papers in published/, and files of other repositories that the user has.

rows = read_papers()            # data set -> its rows
rows = read_vtrain(Path("vTrain"))      # data/ground_truth_single.csv and ..._multi.csv of a checkout
"""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UsageError
from common.models.configs import TransformerConfig

from plan_job import Job
from plan_layout import CODES, Plan
from plan_machine import read_machine

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

HERE = Path(__file__).parent
VTRAIN_URL = "https://github.com/VIA-Research/vTrain"


@dataclass(frozen=True)
class Row:
    """A measured step: what ran, on which machine, and its seconds."""

    dataset: str
    group: tuple[object, ...]
    """What a user asks for: model, GPUs and batch. Rows of a group differ in mesh and micro-batch."""
    job: Job
    plan: Plan
    seconds: float
    gib: float | None = None
    """Measured memory of a rank in GiB, where the source gives it."""

    @property
    def flops(self) -> float:
        """Operations of a step per GPU, with those that are computed again."""
        again = 4 / 3 if self.plan.kept == "inputs" else 1.0
        return again * self.job.flops / self.plan.ranks

    @property
    def record(self) -> dict[str, object]:
        """The row for a file of records."""
        c, p = self.job.config, self.plan
        return {
            **dict(set=self.dataset, gpus=p.ranks, batch=self.job.batch, hidden=c.width, layers=c.layers),
            **dict(pp=p.pp, dp=p.dp, tp=p.tp, micro_batch=p.micro_batch, measured=self.seconds),
        }


# data set -> the machine and the code that it was measured with
PAPERS = {
    "megatron-sc21-table1": ("a100-80gb", "megatron-2021"),
    "megatron-sc21-table2": ("a100-80gb", "megatron-2021"),
    "korthikanti": ("a100-80gb", "megatron-2022"),
    "mt-nlg": ("a100-80gb", "megatron-2021"),
    "megascale": ("a100-80gb", "megatron-2022"),
    "megatron-core": ("h100", "megatron-core"),
    "llama3": ("h100", "megatron-core"),
    "torchtitan": ("h100-96gb-500w", "torchtitan"),
}


def gpt(hidden: int, layers: int, heads: int, vocabulary: int, sequence: int) -> TransformerConfig:
    """Return the shape of a GPT of Megatron-LM: learned positions, a tied head, an MLP four times as wide."""
    return TransformerConfig(layers, hidden, heads, heads, 4 * hidden, sequence, vocabulary)


def read_papers() -> dict[str, list[Row]]:
    """Return the rows of papers by data set."""
    return {name: list(_paper(name)) for name in PAPERS}


def _paper(name: str) -> Iterator[Row]:
    machine, code = read_machine(PAPERS[name][0]), CODES[PAPERS[name][1]]
    lines = (HERE / "published" / f"{name}.csv").read_text().splitlines()
    for x in csv.DictReader(line for line in lines if not line.startswith("#")):
        n = {key: int(x[key]) for key in x if key not in ("model", "kept", "value", "unit", "gib")}
        c = gpt(n["hidden"], n["layers"], n["heads"], n["vocabulary"], n["sequence"])
        if n["mlp_width"] != 4 * n["hidden"]:
            c = replace(c, norm="rmsnorm", positions="rotary", mlp="swiglu", bias=False, tied=False)
            c = replace(c, kv_heads=n["kv_heads"], mlp_width=n["mlp_width"])
        plan = Plan(
            **{axis: n[axis] for axis in ("pp", "dp", "sp", "tp")},
            micro_batch=n["micro_batch"],
            schedule="interleaved" if n["chunks"] > 1 else "1f1b",
            chunks=n["chunks"],
            zero=n["zero"],
            sequence_parallel=bool(n["sequence_parallel"]),
            kept=x["kept"],  # type: ignore[arg-type]
        )
        job = Job(c, code, machine, n["batch"], n["sequence"])
        seconds = _seconds(job, plan, float(x["value"]), x["unit"])
        gib = float(x["gib"]) if x.get("gib") else None
        yield Row(name, (x["model"], n["gpus"], n["batch"]), job, plan, seconds, gib)


def _seconds(job: Job, plan: Plan, value: float, unit: str) -> float:
    """Return the seconds of a step from what a paper prints."""
    c, tokens, model = job.config, job.batch * job.sequence / plan.ranks, job.flops / plan.ranks
    if unit == "hardware TFLOP/s":  # SC'21, equation 3
        ends = 1 + job.sequence / (6 * c.width) + c.vocabulary / (16 * c.layers * c.width)
        return 96 * tokens * c.layers * c.width**2 * ends / (value * 1e12)
    return {
        "s": value,
        "model TFLOP/s": model / (value * 1e12),
        "MFU %": model / (value / 100 * job.peak),
        "tokens/s/GPU": tokens / value,
    }[unit]


VTRAIN_COLUMNS = {
    "gpus": "# GPUs",
    "batch": "global batch",
    "micro_batch": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "# layers",
    "sequence": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}


def read_vtrain(place: Path) -> dict[str, list[Row]]:
    """Return vTrain's measured steps (Bang et al., MICRO'24), by data set: vtrain-single and vtrain-multi.

    place: a checkout of vTrain, a folder of its files, or one of them. Raises UsageError if no file of it is there.
    """
    files = (
        [place] if place.is_file() else sorted({*place.glob("*ground_truth*.csv"), *place.glob("data/*.csv")})
    )
    found: dict[str, list[Row]] = {}
    for file in files:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        lacks = [column for column in VTRAIN_COLUMNS.values() if rows and column not in rows[0]]
        if lacks:
            raise UsageError(f"{file} has no column {lacks[0]!r}; give a file of {VTRAIN_URL}, folder data")
        for x in rows:
            n = {key: int(float(x[column])) for key, column in VTRAIN_COLUMNS.items()}
            name = "vtrain-single" if n["gpus"] <= 8 else "vtrain-multi"
            found.setdefault(name, []).append(_vtrain_row(name, n, float(x["iteration time (ms)"]) / 1e3))
    if not found:
        raise UsageError(f"{place} holds no ground_truth_single.csv; give a checkout of {VTRAIN_URL}")
    return found


def _vtrain_row(name: str, n: dict[str, int], seconds: float) -> Row:
    c = gpt(n["hidden"], n["layers"], n["heads"], 51200, n["sequence"])
    plan = Plan(n["pp"], n["dp"], tp=n["tp"], micro_batch=n["micro_batch"], kept="inputs")
    machine, code = read_machine("a100-80gb-vtrain"), CODES["megatron-2021"]
    group = (n["hidden"], n["layers"], n["gpus"], n["batch"])
    return Row(name, group, Job(c, code, machine, n["batch"], n["sequence"]), plan, seconds)


def calibrates(row: Row) -> bool:
    """Return whether split.toml lets this row calibrate the machine."""
    rule = tomllib.loads((HERE / "split.toml").read_text()).get(row.dataset)
    if rule is None:
        return False
    if "global_batch" in rule:
        return row.job.batch in rule["global_batch"]
    return (row.job.config.width, row.job.config.layers) in {tuple(shape) for shape in rule["shapes"]}
