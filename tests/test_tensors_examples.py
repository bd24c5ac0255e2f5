"""The example programs of split tensors run to their end, on small tensors, and say if a result is wrong."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from mpi.launch import ROOT, mpirun, python, torchrun

from common.comm import Group
from common.lesson.measure import Measured
from common.tensors import Rates
from common.tensors.examples import speed

EXAMPLES = ROOT / "common" / "tensors" / "examples"


@pytest.mark.parametrize(
    ("program", "options", "shown"),
    [
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


def test_each_operation_sends_the_bytes_of_its_formula(tmp_path: Path) -> None:
    rates, records = tmp_path / "machine.json", tmp_path / "records.jsonl"
    Rates().save(rates)
    run = mpirun(2, python(), EXAMPLES / "speed.py", "--scale", "0.02", "--rates", rates, "--json", records)
    assert run.returncode == 0, run.stderr
    assert all(text in run.stdout for text in ("resident", "from rank 0", "of ceiling")), run.stdout
    lines = map(json.loads, records.read_text().splitlines())
    sent = {r["implementation"]: (r["bytes_counted"], r["bytes_formula"]) for r in lines}
    known = {who: pair for who, pair in sent.items() if pair[1] is not None}
    assert {"matmul, resident", "placements, columns x rows", "conv2d, resident", "fft2, transposed"} < set(
        known
    )
    assert all(counted == formula for counted, formula in known.values()), known
    assert known["conv2d, resident"][0] == 8 * 64 * 16 * 4, "a row of each image and channel"
    assert sent["matmul, DTensor"] == (None, None)
    assert sent["matmul, from rank 0"][1] is None


def test_the_ceiling_runs_before_each_operation() -> None:
    ran: list[str] = []
    names = speed.ALONE, speed.CEILING, "resident", "from rank 0"
    found, of_ceiling = speed.timed({n: partial(ran.append, n) for n in names}, 5, Group.alone())
    turn = [speed.ALONE, speed.CEILING, speed.CEILING, "resident", speed.CEILING, "from rank 0"]
    assert ran == turn * 6, "once to warm up"
    assert list(found) == list(names)
    assert list(of_ceiling) == ["resident", "from rank 0"]


def test_the_share_of_the_ceiling_is_that_of_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {speed.ALONE: 9.0, speed.CEILING: 7.0, f"{speed.CEILING} before resident": 2.0, "resident": 3.0}

    def in_turn(turns: dict[str, object], rounds: int, group: Group) -> dict[str, Measured]:
        return {who: Measured([seconds[who] * (1 + round) for round in range(rounds)]) for who in turns}

    monkeypatch.setattr(speed, "in_turn", in_turn)
    names = speed.ALONE, speed.CEILING, "resident"
    _, of_ceiling = speed.timed({who: lambda: None for who in names}, 5, Group.alone())
    assert of_ceiling == {"resident": 1.5}


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
