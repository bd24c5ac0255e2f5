"""Lessons of chapters 01 to 05, started under mpirun as a user would: closing sentences and records."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi.launch import ROOT, need_module, run_worker

from common.benchmarks.measures import problem
from common.launch.runtime import Runtime
from common.launch.spawn import spawn

EQUAL = "proved: equal to one device within 1e-12, bytes counted = formula"
AGREE = "agree with one another within 1e-10"
MODULES = (
    *("fived", "dp_libtorch", "dp_mpi", "pp_libtorch", "pp_mpi", "tp_libtorch", "tp_mpi"),
    *("sp_libtorch", "sp_mpi", "ep_libtorch", "ep_mpi", "hybrid_libtorch", "hybrid_mpi"),
)


@dataclass(frozen=True)
class Lesson:
    """One step of a lesson: the sentences it prints, and the ends of its records' implementation names."""

    file: str
    ranks: int
    options: str
    sentences: tuple[str, ...]
    records: tuple[str, ...]

    @property
    def name(self) -> str:
        return Path(self.file).stem


LESSONS = (
    Lesson(
        "01-data-parallelism/pytorch/dp_languages.py",
        2,
        "--hidden 8",
        (EQUAL, "the versions " + AGREE),
        (
            *("pytorch-mlp", "dp_libtorch", "dp_libtorch-zero1", "dp_mpi", "dp_mpi-ring"),
            *("dp_mpi-zero1", "ddp-mlp"),
        ),
    ),
    Lesson(
        "02-pipeline-parallelism/pytorch/pp_zero_bubble.py",
        2,
        "--sequence 8 --batch 4 --micro-batches 3 --versions zb-v zb-h1",
        (EQUAL,),
        ("zb-v", "zb-h1", "zb-v", "zb-h1"),  # of the times, of the bubbles
    ),
    Lesson(
        "02-pipeline-parallelism/pytorch/pp_languages.py",
        2,
        "--sequence 4 --batch 5 --micro-batches 4 --schedule zb-v",
        (EQUAL, EQUAL, *2 * ("the versions " + AGREE,)),
        ("pytorch", "pp_libtorch", "pytorch-mlp", "pp_mpi"),
    ),
    Lesson(
        "03-tensor-parallelism/pytorch/tp_megatron.py",
        2,
        "--batch 2 --sequence 8 --dropout 0.1",
        (EQUAL,),
        ("plain", "sequence-parallel"),
    ),
    Lesson(
        "03-tensor-parallelism/pytorch/tp_languages.py",
        2,
        "--batch 2 --sequence 8",
        (EQUAL, "the versions " + AGREE),
        ("pytorch-layer", "tp_libtorch", "tp_mpi"),
    ),
    Lesson(
        "01-data-parallelism/pytorch/dp_matrix_multiply.py",
        2,
        "--shape 29 31 37 --panels 3 --gather",
        ("proved: C, dA and dB equal numpy's within 1e-12, bytes counted = formula",),
        ("rows", "columns", "inner", "gathered"),
    ),
    Lesson(
        "04-sequence-parallelism/pytorch/sp_languages.py",
        2,
        "--shape 24 4 8",
        ("o, dq, dk and dv equal one device's within 1e-12, bytes counted = formula",),
        ("attention, pytorch", "attention, sp_libtorch", "attention, sp_mpi"),
    ),
    Lesson(
        "05-expert-parallelism/pytorch/ep_languages.py",
        2,
        "--batch 4 --sequence 8",
        (EQUAL, "the versions " + AGREE),
        ("pytorch-mixture", "ep_libtorch", "ep_mpi"),
    ),
    Lesson(
        "06-hybrid-parallelism/pytorch/hybrid_languages.py",
        4,
        "--batch 5 --sequence 8 --pp 2 --tp 2 --schedule zb-h1",
        (EQUAL, "the versions " + AGREE),
        ("pytorch", "hybrid_libtorch", "hybrid_mpi"),
    ),
)
Found = dict[str, tuple[int, str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run the lessons, one mpirun per number of ranks; return {lesson: (exit code, output, records)}."""
    for module in MODULES:
        need_module(module)
    every: Found = {}
    for ranks in sorted({lesson.ranks for lesson in LESSONS}):
        folder = tmp_path_factory.mktemp("lessons")
        some = [lesson for lesson in LESSONS if lesson.ranks == ranks]
        commands = [
            [
                str(ROOT / lesson.file),
                *lesson.options.split(),
                "--steps",
                "1",
                "--json",
                str(folder / lesson.name),
            ]
            for lesson in some
        ]
        ends = run_worker(ranks, "lessons_worker.py", folder, json.dumps(commands))
        for lesson, (code, printed) in zip(some, ends, strict=True):
            records = (folder / lesson.name).read_text().splitlines()
            every[lesson.name] = code, printed, [json.loads(line) for line in records]
    return every


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_lesson_under_mpirun(lesson: Lesson, found: Found) -> None:
    code, printed, records = found[lesson.name]
    assert code == 0, printed
    for sentence, times in Counter(lesson.sentences).items():
        assert printed.count(sentence) == times, printed
    assert not any(map(problem, records))
    for record, name in zip(records, lesson.records, strict=True):
        if "bubble" in record:
            assert record["schedule"] == name
            continue
        assert record["implementation"].split()[-1] == name.split()[-1]
        assert (record["ranks"], record["backend"], record["equal"]) == (lesson.ranks, "mpi", True)
        assert record["bytes_counted"] in (None, record["bytes_formula"])


def test_languages_are_named(found: Found) -> None:
    for lesson in LESSONS:
        for record in found[lesson.name][2] if lesson.name.endswith("languages") else ():
            language = {"libtorch": "libtorch", "mpi": "cpp-mpi"}
            name = record["implementation"].split()[-1].split("-")[0].partition("_")[2]
            assert record["language"] == language.get(name, "pytorch")


def test_what_a_pipeline_waited_and_when(found: Found) -> None:
    bubbles = [record for record in found["pp_zero_bubble"][2] if "bubble" in record]
    assert len(bubbles) == 2
    for r in bubbles:
        formula, simulated, *others = r["bubble"].values()
        assert formula == pytest.approx(simulated)
        assert all(0 < share < 1 for share in others)
        for rows in r["timelines"].values():
            computed = [(op, micro) for row in rows.values() for _, _, op, micro in row]
            stages = 2 if r["schedule"] == "zb-h1" else 4
            assert Counter(computed) == {(op, str(m)): stages for op in "FIW" for m in range(3)}


def unlike(rt: Runtime, lesson: str, options: str, module: str, file: Path) -> bool:
    """Return the lesson's verdict if no difference between two versions is tolerated, not even 0."""
    main = importlib.import_module(lesson)
    versions = ("pytorch-mlp",) if lesson[:2] == "dp" else tuple(main.LANGUAGES)
    importlib.import_module(module).TOLERANCE = {torch.float64: -1.0}  # type: ignore[attr-defined]
    holds: bool = main.main(rt, getattr(main, options)(json=file, steps=1, versions=versions))
    return holds


@pytest.mark.parametrize(
    "names",
    [
        ("dp_languages", "LanguageOptions", "common.lesson.languages"),
        ("tp_languages", "LanguageOptions", "common.lesson.languages"),
    ],
)
def test_versions_that_disagree_are_recorded_as_unequal(names: tuple[str, str, str], tmp_path: Path) -> None:
    need_module("fived")
    assert spawn(unlike, 1, *names, tmp_path / "records") == [False]
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    assert {record["equal"] for record in records} == {False}
    assert max(record["largest_difference"] for record in records) <= 1e-12
