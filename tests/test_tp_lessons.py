"""Lessons of chapters 03 to 05 as they are started: under mpirun, with their sentence at the end and their records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mpi.launch import mpirun, need_module

from common.benchmarks.measures import problem

ROOT = Path(__file__).resolve().parents[1]
TP, SP, EP = (
    ROOT / chapter / "pytorch"
    for chapter in ("03-tensor-parallelism", "04-sequence-parallelism", "05-expert-parallelism")
)
SMALL = ["--steps", "1", "--batch", "2"]


@pytest.mark.parametrize(
    ("lesson", "ranks", "options", "implementations", "sentence"),
    [
        (
            TP / "tp_megatron.py",
            2,
            [*SMALL, "--sequence", "8", "--dropout", "0.1"],
            ["plain", "sequence-parallel"],
            "proved: equal to one device within 1e-12, bytes counted = formula",
        ),
        (
            TP / "tp_languages.py",
            2,
            [*SMALL, "--sequence", "8"],
            ["pytorch-layer", "tp_libtorch", "tp_mpi"],
            "the languages agree with one another within 1e-10",
        ),
        (
            SP / "sp_languages.py",
            3,
            ["--steps", "1", "--shape", "24", "4", "8"],
            ["attention, pytorch", "attention, sp_libtorch", "attention, sp_mpi"],
            "o, dq, dk and dv equal one device's within 1e-12, bytes counted = formula",
        ),
        (
            EP / "ep_languages.py",
            3,
            ["--steps", "1", "--batch", "4", "--sequence", "8"],
            ["pytorch-mixture", "ep_libtorch", "ep_mpi"],
            "the languages agree with one another within 1e-10",
        ),
    ],
    ids=["tp_megatron", "tp_languages", "sp_languages", "ep_languages"],
)
def test_lesson_under_mpirun(
    lesson: Path, ranks: int, options: list[str], implementations: list[str], sentence: str, tmp_path: Path
) -> None:
    for module in ("tp_mpi", "tp_libtorch", "sp_mpi", "sp_libtorch", "ep_mpi", "ep_libtorch"):
        need_module(module)
    file = tmp_path / "records.jsonl"
    done = mpirun(ranks, sys.executable, lesson, *options, "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sentence in done.stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert not any(map(problem, records))
    assert len(records) == len(implementations)
    for record, name in zip(records, implementations, strict=True):
        assert name.split()[-1] in record["implementation"]
        assert (record["ranks"], record["equal"]) == (ranks, True)
        assert record["bytes_counted"] in (None, record["bytes_formula"])
