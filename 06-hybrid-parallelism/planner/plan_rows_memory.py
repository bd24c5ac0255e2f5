"""Measured memory of ranks: files of other repositories that the user has, and rows of papers that give it.

rows = read_simumax(Path("SimuMax"))    # docs/b200/b200_release_v1.2_summary.md of a checkout, or a CSV of its columns
rows = read_nanotron(Path("best.csv"))  # best configurations of nanotron's benchmark, a CSV

    memory_error(row)   -> predicted over measured GiB, minus 1

SimuMax's rows are bytes allocated by Megatron-Core, whose layers plan_memory.py counts. Nanotron keeps more than is
counted here, and torchtitan's rows are bytes reserved, of layers that recompute every second product.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from common.errors import UsageError
from common.launch.terminal import make_table
from common.models.configs import TransformerConfig, llama

from plan_job import Job
from plan_layout import CODES, Plan
from plan_machine import read_machine
from plan_memory import memory
from plan_models import MODELS
from plan_rows import Row
from plan_search import GIB

T = TypeVar("T")

SIMUMAX_URL = "https://github.com/MooreThreads/SimuMax"
SIMUMAX_FILES = ("docs/b200/b200_release_v1.2_summary.md", "*b200*.md", "*b200*.csv")
SIMUMAX_COLUMNS = ("case", "real_ms", "real_alloc_GiB")
SIMUMAX_MODELS = {
    "llama3_70b": MODELS["llama3-70b"],
    "llama3_405b": MODELS["llama3-405b"],
    "deepseekv2": MODELS["deepseek-v2"],
    "deepseekv3": replace(MODELS["deepseek-v3"], dense_layers=1),  # type: ignore[call-arg]  # as in these runs
}

NANOTRON_COLUMNS = ("params_b", "dp", "tp", "pp", "mbs", "zero", "gbs_seqs", "mfu_pct", "mem_GB")
# billions of parameters -> layers, width, heads, MLP; the sizes hold with the vocabulary of 131,072
NANOTRON_SHAPES = {
    1.34: (16, 2048, 32, 8192),
    3.57: (28, 3072, 32, 8192),
    8.86: (32, 4096, 32, 14336),
    80.0: (80, 8192, 64, 28672),
}
# its MLP keeps the result of its activation; its loss has logits in 16 bits, in 32, and those less their maximum
NANOTRON = replace(CODES["megatron-core"], name="nanotron", fused_activation=False, logit_bytes=10)


def memory_error(row: Row) -> float:
    """Return the relative error of the predicted memory. The row has a measured one."""
    return memory(row.job, row.plan).total / GIB / (row.gib or 0) - 1


def memory_table(rows: Mapping[str, Sequence[Row]]) -> Table:
    """Return the table of errors by set."""
    heads = ["set", ">rows", ">median |error|", ">bias", ">largest"]
    made = make_table("predicted against measured memory of a rank", heads)
    for name, found in rows.items():
        errors = [memory_error(row) for row in found]
        sizes = [abs(error) for error in errors]
        cells = f"{statistics.median(sizes):.1%}", f"{statistics.mean(errors):+.1%}", f"{max(sizes):.1%}"
        made.add_row(name, str(len(found)), *cells)
    return made


def read_simumax(place: Path) -> list[Row]:
    """Return the runs of Megatron-LM on 8 B200 that SimuMax compares itself with.

    place: a checkout of SimuMax, a folder with its table, or that file: Markdown, or CSV with the same columns. The
    name of a case says what ran. Raises UsageError where the table is missing, or no such table.
    """
    file = _file(place, SIMUMAX_FILES, f"a checkout of {SIMUMAX_URL}")
    return _rows(file, SIMUMAX_COLUMNS, _simumax_row)


def _simumax_row(x: dict[str, str]) -> Row:
    name = next(name for name in SIMUMAX_MODELS if x["case"].startswith(name))
    n = {key: int(value) for key, value in re.findall(r"_(l|tp|pp|dp|ep|cp|seq|mbc)(\d+)", x["case"])}
    sequence, ep, tp = n.get("seq", 4096), n.get("ep", 1), n["tp"]
    if n["dp"] % ep:  # experts lie on ranks of other samples
        raise ValueError
    c = replace(SIMUMAX_MODELS[name], layers=n["l"])
    plan = Plan(n["pp"], n["dp"] // ep, ep, n.get("cp", 1), tp, zero=1, sequence_parallel=tp > 1)
    # memory depends on no machine, and the planner ships none with B200: these rows compare memory alone
    job = Job(c, CODES["megatron-core"], read_machine("h100"), n["mbc"] * plan.samples, sequence)
    return Row("simumax-b200", (x["case"],), job, plan, float(x["real_ms"]) / 1e3, _gib(x["real_alloc_GiB"]))


def read_nanotron(place: Path) -> list[Row]:
    """Return nanotron's best configurations on H100, from a CSV with the columns NANOTRON_COLUMNS, or its folder.

    Raises UsageError where the file is missing, or no such table.
    """
    file = _file(place, ("*nanotron*.csv",), "a CSV of nanotron's best configurations")
    return _rows(file, NANOTRON_COLUMNS, _nanotron_row)


def _nanotron_row(x: dict[str, str]) -> Row:
    layers, width, heads, mlp_width = NANOTRON_SHAPES[float(x["params_b"])]
    c: TransformerConfig = llama(layers, width, heads, heads, mlp_width, 4096, 131072)
    c = replace(c, tied=mlp_width < 10_000)
    n = {key: int(x[key]) for key in ("dp", "tp", "pp", "mbs", "zero", "gbs_seqs")}
    plan = Plan(n["pp"], n["dp"], tp=n["tp"], micro_batch=n["mbs"], zero=n["zero"])
    plan = replace(plan, sequence_parallel=n["tp"] > 1)
    job = Job(c, NANOTRON, read_machine("h100"), n["gbs_seqs"], 4096)
    seconds = job.flops / plan.ranks / (float(x["mfu_pct"]) / 100 * job.peak)
    return Row("nanotron", (x["params_b"], plan.ranks), job, plan, seconds, _gib(x["mem_GB"]))


def _gib(text: str) -> float:
    """Return a measured memory. Raises ValueError where it is not above 0."""
    if not float(text) > 0:
        raise ValueError
    return float(text)


def _file(place: Path, patterns: Sequence[str], wanted: str) -> Path:
    """Return the file, or the first in the folder whose name fits a pattern."""
    found = [place] if place.is_file() else [f for pattern in patterns for f in sorted(place.glob(pattern))]
    if not found:
        raise UsageError(f"{place} holds no {patterns[0]}; give {wanted}")
    return found[0]


def _rows(file: Path, columns: Sequence[str], make: Callable[[dict[str, str]], T]) -> list[T]:
    """Return what `make` makes of each row of a table that has these columns."""
    table = _table(file)
    lacks = [column for column in columns if not table or column not in table[0]]
    if lacks:
        raise UsageError(f"{file} has no column {lacks[0]!r}; a row has {', '.join(columns)}")
    made = []
    for number, x in enumerate(table, 1):
        try:
            made.append(make(x))
        except (KeyError, ValueError, TypeError, StopIteration, ZeroDivisionError) as error:
            told = ", ".join(f"{column} {x[column]!r}" for column in columns)
            raise UsageError(f"{file}, row {number}: cannot tell what ran from {told}") from error
    return made


def _table(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV, or of the table in a Markdown file, with _ for blanks in the names of columns."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if file.suffix == ".md":
        rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line[:1] == "|"]
        names = [name.replace(" ", "_") for name in rows[0]] if rows else []
        return [dict(zip(names, row, strict=False)) for row in rows[2:]]  # without the line of dashes
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
