"""The example programs of split tensors run to their end, on small tensors, and say if a result is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from mpi.launch import ROOT, mpirun, python, torchrun

from common.tensors import Rates

EXAMPLES = ROOT / "common" / "tensors" / "examples"


@pytest.mark.parametrize(
    ("program", "options", "shown"),
    [
        ("speed.py", ["--scale", "0.02", "--rounds", "5"], ["resident", "from rank 0"]),
        (
            "speed.py",
            ["--cases", "large_matmul", "large_conv2d", "large_fft2", "--scale", "0.02"],
            ["resident"],
        ),
        ("costs.py", ["--shapes", "2", "--rounds", "3"], ["2 shapes on 2 rank(s)", "regret: median"]),
        ("overlap.py", ["--rows", "64", "--rounds", "5"], ["rows, b in panels", "halo meanwhile"]),
        ("balance.py", ["--rows", "200", "--steps", "5"], ["optimum"]),
    ],
)
def test_example(program: str, options: list[str], shown: list[str], tmp_path: Path) -> None:
    if program != "balance.py":
        Rates().save(tmp_path / "machine.json")
        options = [*options, "--rates", str(tmp_path / "machine.json")]
    run = mpirun(2, python(), EXAMPLES / program, *options)
    assert run.returncode == 0, run.stderr
    assert all(text in run.stdout for text in shown), run.stdout


def test_the_smallest_program() -> None:
    assert mpirun(3, python(), EXAMPLES / "mean.py").stdout == "21.5\n"


def test_programs_on_rank_0() -> None:
    run = mpirun(4, python(), EXAMPLES / "test_all.py", "--scale", "0.1")
    assert run.returncode == 0, run.stderr
    assert "16/16 passed on 4 rank(s)" in run.stdout
    run = torchrun(2, str(EXAMPLES / "matrix_multiplication.py"), "--size", "65")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("largest difference from torch") == 2


def test_a_wrong_product_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.tensors.examples import test_all as program

    expected = torch.ones(3)
    assert program.error_of(expected, expected) == 0
    assert program.error_of(expected + 0.5, expected) == 0.5
    assert program.error_of(torch.ones(2), expected) == math.inf
    right = program.cases

    def one_wrong(scale: float) -> dict[str, program.Case]:
        found = {"add": right(scale)["add"]}
        return {name: case._replace(theirs=lambda a, b: a - b) for name, case in found.items()}

    monkeypatch.setattr(program, "cases", one_wrong)
    assert program.main(program.Options(scale=0.05)) == 1
