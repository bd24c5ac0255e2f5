"""What hybrid_languages.py refuses, and eight ranks in three languages; test_lessons.py runs it on four."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi.launch import ROOT, mpirun, need_module, python, refusal

import hybrid_languages
import hybrid_proof_cpp
from hybrid_languages import LanguageOptions

LESSON = ROOT / "06-hybrid-parallelism/pytorch/hybrid_languages.py"
SMALL = ("--batch", "4", "--sequence", "8", "--steps", "1", "--micro-batches", "1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--versions", "hybrid_rust"],
            "--versions hybrid_rust: choose from pytorch, hybrid_libtorch, hybrid_mpi",
        ),
        (["--versions"], "--versions: choose at least one of pytorch, hybrid_libtorch, hybrid_mpi"),
        (
            ["--attention", "ulysses"],
            "--attention ulysses: C++ has zigzag and ring; or give --versions pytorch",
        ),
        (["--zero", "2"], "--zero 2: C++ has stage 1; or give --versions pytorch"),
        (["--zero", "1"], "hybrid_mpi has no --zero 1: give --versions pytorch hybrid_libtorch"),
        (["--model", "llama-tiny"], "hybrid_mpi has no --model llama-tiny"),
        (["--sequence-parallel"], "hybrid_mpi has no --sequence-parallel"),
        (["--model", "mixtral-tiny", "--ep", "2"], "hybrid_mpi has no --model mixtral-tiny"),
        (["--model", "switch-tiny"], "--model switch-tiny: an expert has a capacity, and C++ drops no token"),
        (["--tp", "2"], "mesh pp=1 dp=1 ep=1 sp=1 tp=2 needs 2 ranks, the world has 1"),
        (["--nproc", "2"], "hybrid_mpi needs MPI between its 2 ranks; start them with mpirun -np 2 python"),
    ],
)
def test_bad_input_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(hybrid_languages.main, LanguageOptions, capsys, *options)


@pytest.mark.parametrize(
    "options",
    [
        "--pp 2 --dp 2 --tp 2",
        "--model gpt2-moe-tiny --dp 2 --ep 2 --tp 2",
        "--model mixtral-tiny --dp 2 --ep 2 --tp 2 --versions pytorch hybrid_libtorch",
    ],
    ids=["gpt2", "gpt2-moe", "mixtral"],
)
def test_eight_ranks_agree(options: str) -> None:
    for module in ("fived", "hybrid_libtorch", "hybrid_mpi"):
        need_module(module)
    done = mpirun(8, python(), LESSON, *SMALL, *options.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proved: equal to one device within 1e-12, bytes counted = formula" in done.stdout
    assert "the versions agree with one another within 1e-10" in done.stdout


def test_three_ranks_agree_where_nothing_divides() -> None:
    """Of a width of 48 or 13, a vocabulary of 256 and a sequence of 8 the first ranks hold more."""
    for module in ("fived", "hybrid_libtorch", "hybrid_mpi"):
        need_module(module)
    done = mpirun(3, python(), ROOT / "tests/mpi/uneven_languages.py", *SMALL, "--tp", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the versions agree with one another within 1e-10") == 2


def test_rows_of_the_proof_table(tmp_path: Path) -> None:
    """One mesh of eight for each program, with SGD and AdamW, and the page that is written."""
    lesson = LESSON.with_name("hybrid_proof_cpp.py")
    done = mpirun(8, python(), lesson, "--every", "69", "--write", tmp_path / "proof.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 rows, 0 failing" in done.stdout
    assert (tmp_path / "proof.md").read_text().count(" | yes |\n") == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--programs", "hybrid_rust"], "--programs hybrid_rust: choose from hybrid_libtorch, hybrid_mpi"),
        ([], "the table has meshes of 8 ranks, the world has 1"),
    ],
)
def test_bad_rows_are_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(hybrid_proof_cpp.main, hybrid_proof_cpp.CppProofOptions, capsys, *options)
