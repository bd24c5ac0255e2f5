"""Measure steps on many meshes of this machine, and compare times, their order and memory with the planner's.

    python measure_meshes.py        # 22 meshes of 1 to 4 ranks: ten minutes on two cores
    python measure_meshes.py --machine my-machine.toml --models gpt2-10m llama-10m
    python measure_meshes.py --memory-only --every 2        # every second mesh

measure_step.py runs each mesh, with one thread per rank. Spearman's rank correlation says how well the planner orders
them: 1 for the measured order. Meshes whose times differ by less than a tenth are often in another order the next time;
so pairs that differ by more are counted on their own.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from common.errors import UsageError
from common.launch import forked, spawn
from common.launch.command_line import Checked, Count, Within, parse
from common.launch.program import run_program
from common.launch.terminal import make_table, terminal
from common.lesson.runner import write_records
from common.models.configs import config

from plan_machine import read_machine
from validate import spearman

MESHES = (
    *("", "--micro-batches 4", "--checkpointing"),
    *("--dp 2", "--dp 2 --zero 1", "--dp 2 --zero 3", "--tp 2", "--tp 2 --sequence-parallel", "--sp 2"),
    *("--pp 2 --micro-batches 1", "--pp 2 --micro-batches 4", "--pp 2 --micro-batches 4 --schedule zb-h1"),
    *("--dp 3", "--dp 4 --zero 3", "--dp 4", "--tp 4", "--sp 4", "--pp 4 --micro-batches 4"),
    *("--pp 2 --tp 2", "--pp 2 --dp 2", "--dp 2 --tp 2 --checkpointing", "--sp 2 --tp 2"),
)
APART = 0.1  # relative difference of two times that are not taken as equal


@dataclass
class MeshesOptions(Checked):
    """Options: what to train on the meshes, and whose numbers predict."""

    models: tuple[str, ...] = ("llama-13m",)
    """Models to train."""
    machine: str = "cpu"
    """Name of a machine, or a .toml file that calibrate.py has written."""
    batch: Annotated[int, Within(1, 2**16)] = 24
    """Samples in the global batch."""
    sequence: Annotated[int, Within(1, 2**16)] = 128
    """Tokens per sample."""
    steps: Count = 5
    """Steps to time."""
    memory_only: bool = False
    """Measure memory, and time no step."""
    every: Annotated[int, Within(1, len(MESHES))] = 1
    """Measure every n-th mesh alone."""
    json: Path | None = None
    """File to write a record per mesh to."""


def measure(o: MeshesOptions, model: str, mesh: str, python: Path) -> dict[str, Any]:
    """Return measure_step.py's record of a mesh; `python` runs it. Raises UsageError if it fails."""
    ranks = math.prod(int(n) for n in re.findall(r"--(?:pp|dp|ep|sp|tp) (\d+)", mesh))
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "row.json")
        said = {
            "nproc": ranks,
            "model": model,
            "machine": o.machine,
            "batch": o.batch,
            "sequence": o.sequence,
            "steps": o.steps,
            "json": record,
        }
        words = [word for key, value in said.items() for word in (f"--{key}", str(value))]
        words += ["--memory-only"] * o.memory_only
        command = [str(python), str(Path(__file__).with_name("measure_step.py")), *words, *mesh.split()]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if done.returncode:
            lines_said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise UsageError(f"{model} {mesh}: {lines_said[-1].removeprefix('error: ')}")
        row: dict[str, Any] = json.loads(record.read_text())
        return row


def environment() -> dict[str, str]:
    """Return the variables of ranks that have one thread each."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


@contextmanager
def interpreter() -> Iterator[Path]:
    """Yield a Python that forks scripts from a process with torch imported, where the system can."""
    if not forked.possible():
        yield Path(sys.executable)
        return
    with forked.interpreter(spawn.PRELOAD, environment()) as folder:
        yield folder / "python"


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the table's lines: milliseconds, and MB of the fullest rank."""
    for row in rows:
        cells = [row["model"], row["plan"]]
        for what, scale in (("seconds", 1e3), ("bytes", 1e-6)):
            if what not in row:
                cells += ["", "", ""]
                continue
            measured, found = row[what], row[f"predicted {what}"]
            cells += [f"{scale * measured:,.0f}", f"{scale * found:,.0f}", f"{found / measured - 1:+.1%}"]
        yield (*cells, f"{row['spread']:.0%}" if "spread" in row else "")


def sentence(rows: Sequence[dict[str, Any]]) -> str:
    """Return how well predicted times order the meshes of each model."""
    of_model = [list(group) for _, group in itertools.groupby(rows, lambda row: row["model"])]
    times = [[(row["predicted seconds"], row["seconds"]) for row in group] for group in of_model]
    ranks = ", ".join(
        f"{group[0]['model']} {spearman(t):.2f}" for group, t in zip(of_model, times, strict=True)
    )
    pairs = [
        (a, b)
        for t in times
        for a, b in itertools.combinations(t, 2)
        if max(a[1], b[1]) > (1 + APART) * min(a[1], b[1])
    ]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    errors = [abs(p / s - 1) for t in times for p, s in t]
    return (
        f"rank correlation: {ranks}; {right} of {len(pairs)} pairs whose times differ by more than {APART:.0%} are in "
        f"order; mean absolute error {sum(errors) / len(errors):.1%}"
    )


def table(o: MeshesOptions, rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of all meshes."""
    heads = ["model", "plan", ">ms", ">predicted", ">off by", ">MB", ">predicted", ">off by", ">spread of ms"]
    return make_table(
        f"{o.batch} x {o.sequence} tokens in float32, predicted for {o.machine}", heads, lines(rows)
    )


def main() -> int:
    """Measure all meshes and print the table."""
    o, rows = parse(MeshesOptions, __doc__), []
    read_machine(o.machine)  # refused now, not in the first mesh
    for model in o.models:
        config(model)
    write_records(o.json, [])  # fails now if the file cannot be written
    out = terminal()
    with interpreter() as python:
        for model, mesh in itertools.product(o.models, MESHES[:: o.every]):
            rows.append(measure(o, model, mesh, python))
            write_records(o.json, rows[-1:])
            if out.is_terminal:
                out.print(f"{model} {rows[-1]['plan']}", style="dim")
    out.print(table(o, rows))
    if not o.memory_only:
        out.print(sentence(rows), soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_program(main)
