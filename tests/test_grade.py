"""The grader: what an answer may use, its command line, and model files of one's own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mpi.launch import python

from common.errors import RankError, UsageError
from common.grade.__main__ import GradeOptions, main, show
from common.grade.attempt import _failed, attempt
from common.grade.cpp import refused_in_cpp
from common.grade.exercises import ROOT, Exercise, Outcome, find, refused
from common.grade.mine import grade_mine
from common.grade.targets import Wrong, at_most, counted, exactly, same
from common.launch.terminal import terminal

OWN = (ROOT / "examples" / "model_to_grade.py").read_text()


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("", "", ""),
        ("/ batch[1].numel()", "/ y.numel()", "loss, step 0 is"),
        ("    sum_gradients(model.parameters(), mesh)\n", "", "differ: its gradient was not summed"),
        (
            "    sum_gradients(model.parameters(), mesh)\n",
            "    sum_gradients(model.parameters(), mesh)\n    sum_gradients(model.parameters(), mesh)\n",
            "the gradient of 0.weight, step 0 is 2 times the right one, in every element",
        ),
    ],
)
def test_a_model_of_ones_own(tmp_path: Path, right: str, wrong: str, says: str) -> None:
    assert right in OWN
    file = tmp_path / "own.py"
    file.write_text(OWN.replace(right, wrong) if right else OWN)
    found = grade_mine(file, "dp=2 tp=2")
    assert set(found) == {"sgd", "adamw"}
    for said in found.values():
        assert (says in said) if says else said == "", found


@pytest.mark.parametrize(
    ("mesh", "source", "says"),
    [
        ("xp=2", OWN, "give axes and ranks like"),
        ("dp=0", OWN, "give axes and ranks like"),
        ("dp=2", "x = 1", "has no function make_model"),
        ("dp=2", None, "there is no such file"),
        ("dp=2", "x = 1 +", "line 1 is no Python: invalid syntax"),
        ("dp=2", "import no_such_module", "it raised ModuleNotFoundError in line 1, `import no_such_module`"),
        (
            "dp=2",
            OWN.replace("def batch(step: int)", "def batch()"),
            r"batch must take \(step\), but too many",
        ),
    ],
    ids=["no axis", "no ranks", "no function", "no file", "no Python", "no module", "no argument"],
)
def test_a_bad_model_file(tmp_path: Path, mesh: str, source: str | None, says: str) -> None:
    if source:
        (tmp_path / "own.py").write_text(source)
    with pytest.raises(UsageError, match=says):
        grade_mine(tmp_path / "own.py", mesh)


def test_a_function_that_raises_is_named_once_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN.replace("    loss.backward()", "    raise ValueError('no loss')"))
    with pytest.raises(RankError) as error:
        grade_mine(file, "dp=2")
    assert re.fullmatch(
        r"error: step of .*own.py: it raised ValueError in line \d+, `raise .*`: no loss", str(error.value)
    )
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import torch\nfrom common import comm\ncomm.send", ""),
        ("from dp_zero import Zero", "line 1 imports dp_zero"),
        ("from common import lesson", "imports common.lesson"),
        ("import torch\ntorch.distributed.all_reduce", "line 2 uses 'distributed'"),
        ("from common import comm\ncomm.everyones(1, None)", "uses 'everyones'"),
        ("import importlib", "imports importlib"),
        ("__import__('dp_zero')", "uses '__import__'"),
        ("exec('import dp_zero')", "uses 'exec'"),
        ("from common.comm import *", "imports common.comm.*"),
        ("load, calls, library = 1, 2, 3\nprint(load + calls)", ""),
        ("class A:\n    def f(self):\n        self.calls = self.load = 1", ""),
        ("from torch import distributed", "imports torch.distributed"),
        ("from collections import _sys", "imports collections._sys"),
        ("import torch\ntorch._C", "uses '_C'"),
        ("from common import comm\ncomm.send = print", "line 2 changes comm.send"),
        ("import torch\ntorch.Tensor.abs = abs", "line 2 changes torch.Tensor.abs"),
        ("def f(e):\n    return e.__traceback__", "uses '__traceback__'"),
        ("import torch\ntorch.from_file('x', shared=True)", "uses 'from_file'"),
        ("class A:\n    def __init__(self):\n        super().__init__()\n        self._x = 1", ""),
    ],
)
def test_what_an_answer_may_use(source: str, says: str) -> None:
    assert (says in refused(source)) if says else refused(source) == ""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("#include <vector>\n#include <mpi.h>\nMPI_Send(x, 1, MPI_DOUBLE, 0, 0, comm); // MPI_Bcast", ""),
        ("MPI_Bcast(x)", "line 1 calls MPI_Bcast"),
        ("PMPI_Send(x)", "line 1 calls PMPI_Send"),
        ('#include "fived/mpi/mpi.hpp"', "line 1 includes"),
        ("#include <fived/mpi/mpi.hpp>", "line 1 includes"),
        ('system("x")', "line 1 calls system"),
        ("x;\nexit(0)", "line 2 calls exit"),
        ('f("//"); MPI_Bcast(x)', "line 1 calls MPI_Bcast"),
        ("#define CALL(x) MPI_##x", "line 1 uses ##"),
        ("/* MPI_Bcast\n */ f(\"MPI_Bcast\", '\"'); executed(1'000)\nMPI_Bcast()", "line 3 calls MPI_Bcast"),
        ("#include <fstream>", "line 1 includes"),
    ],
)
def test_what_an_answer_in_cpp_may_use(source: str, says: str) -> None:
    found = refused_in_cpp(source, "// allowed: MPI_Send MPI_Recv\n")
    assert (says in found) if says else found == ""


def test_messages_of_targets() -> None:
    want = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    for got, says in [
        (None, "x is None, a tensor of shape"),
        (want[:2], "x has shape .2,., .3,. is needed"),
        (want.float(), "x has type torch.float32"),
        (2 * want, "x is 2 times the right one"),
        (0 * want, "x is zero everywhere"),
        (want * torch.nan, "3 elements that are not finite"),
        (want.flip(0), "x is the other way round"),
        (want + torch.eye(3)[1], r"wrong in 1 of 3 elements; the first, \[1\], is 3, 2 is right"),
    ]:
        with pytest.raises(Wrong, match=says):
            same("x", got, want, {"the other way round": want.flip(0)})
    same("x", want * (1 + 1e-14), want)
    with pytest.raises(Wrong, match="messages: 3, exactly 2 is needed"):
        exactly("messages", 3, 2)
    with pytest.raises(Wrong, match="bytes: 2,000, at most 1,000 is allowed"):
        at_most("bytes", 2000, 1000)
    with counted():
        pass


def test_the_command_line() -> None:
    command = [python(), ROOT / "common" / "grade" / "__main__.py", "06/1", "--seed", "3"]
    stub = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert stub.returncode == 1
    assert "06/1  to write  0 of" in stub.stdout
    assert "first: divide the rank" in stub.stdout
    command = [sys.executable, "-m", "common.grade", "06/99"]
    assert subprocess.run(command, capture_output=True, timeout=240).returncode == 2


def test_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(GradeOptions("06/1", "solutions")) == 0
    assert "1 of 1 passed" in capsys.readouterr().out
    with pytest.raises(UsageError, match="there is no exercise '06/99'; choose from 06/1"):
        main(GradeOptions("06/99"))
    missed = Outcome(("first", "second", "third"), 1, "x is 2, 1 is right")
    show(terminal(), find("06/1")[0], missed)
    shown = capsys.readouterr().out
    assert "06/1  FAILED    1 of 3 targets met" in shown
    assert shown.endswith("1 more not tried\n")


def test_chapters_and_numbers() -> None:
    assert [e.number for e in find("06")] == sorted(e.number for e in find("06"))
    assert len({e.name for e in find()}) == len(find())
    assert [e.name for e in find("3/02")] == ["03/2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"x = 1\nname = '\xe4'\n", "line 2 is not in UTF-8"),
        (b"def f(:\n", "line 1 is no Python"),
        (b"x = " + b"-" * 20000 + b"1", "is no Python"),
        (b"x = 1\0", "is no Python"),
    ],
    ids=["latin-1", "syntax", "nested", "null"],
)
def test_a_file_that_is_no_program(tmp_path: Path, text: bytes, says: str) -> None:
    """Its title is that of the stub, or the name of the file."""
    (tmp_path / "exercises").mkdir()
    (tmp_path / "targets").mkdir()
    targets = find("06/1")[0].targets
    exercise = Exercise("06", 1, tmp_path / "exercises" / targets.name)
    exercise.targets.write_bytes(targets.read_bytes())
    exercise.path.write_bytes(text)
    outcome = attempt(exercise, 7)
    assert not outcome.passed
    assert says in outcome.wrong
    assert exercise.title == targets.name


def test_an_answer_that_does_not_end() -> None:
    """No rank waits for another where the first one computes for ever."""
    exercise = find("01/1")[0]
    places = f"  rank 0 stands {exercise.path}:18 (f)\n  rank 1 stands in barrier over 'world' for 1.0 s, x.py:3 (g)"
    assert _failed(places, 0, exercise) == (
        0,
        "it does not end: rank 0 stands, line 18; rank 1 has ended its part",
    )
    assert _failed(places.replace("x.py", str(exercise.path)), 0, exercise)[1].startswith(
        "the ranks wait for one"
    )
