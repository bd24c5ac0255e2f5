"""The commands that the benchmark runs: the cases of the chapters, chosen and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import EQUAL, FAILS, TIMED, chapter

from common.benchmarks import benchmark_all
from common.benchmarks.cases import Case, load, select
from common.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("title = ", ["cannot be read"]),
        ('name = "x"', ["needed are title", "[[case]]", "['name']"]),
        ('title = "x"\n[case]\nname = "y"', ["needed are title", "[[case]]"]),
        ('title = "x"\ncase = [1]', ["needed are title", "[[case]]"]),
        (TIMED.replace("ranks = ", "rank = "), ["case 1 (timed)", "unknown rank;", "ranks"]),
        ("[[case]]\nlauncher = 'python'", ["case 1", "name, command, ranks missing"]),
        (TIMED.replace('"python"', '"slurm"'), ["'slurm'", "mpirun, torchrun, python"]),
        (TIMED.replace("{scaling}", "{json}"), ["{json}", "{ranks}, {scaling}, {variant}"]),
        (TIMED.replace("{scaling}", "{}"), ["{}", "{ranks}, {scaling}, {variant}"]),
        (TIMED.replace("{scaling}", "{scaling"), ["command cannot be read"]),
        (TIMED.replace("{scaling}", "'"), ["command cannot be read"]),
        (TIMED.replace("[1, 2]", "[]"), ["ranks = []", "[1, 2, 4]"]),
        (TIMED.replace("[1, 2]", "[0]"), ["ranks = [0]", "[1, 2, 4]"]),
        (TIMED.replace("[1, 2]", "2"), ["ranks = 2", "[1, 2, 4]"]),
        (TIMED.replace('["strong", "weak"]', '"strong"'), ["scalings = 'strong'", "list"]),
        (TIMED.replace('"weak"', '"both"'), ["'both'", "strong, weak"]),
        (TIMED + "quick = 3", ["quick = 3", "text"]),
        (TIMED + "variants = []", ["variants = []", "list"]),
        (TIMED + TIMED, ["two cases", "'timed'"]),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    folder = chapter(tmp_path)
    (folder / "benchmark.toml").write_text(text if "[[" not in text else f'title = "Toys"\n{text}')
    with pytest.raises(UsageError) as error:
        load(tmp_path)
    message = str(error.value)
    assert "\n" not in message
    assert "01-toys/benchmark.toml" in message
    assert all(part in message for part in parts), message


def test_no_cases(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no cases"):
        load(tmp_path)


def test_chapters_come_in_order_before_common(tmp_path: Path) -> None:
    chapter(tmp_path, EQUAL, name="02-b")
    chapter(tmp_path, TIMED, name="01-a")
    chapter(tmp_path, FAILS, name="common/benchmarks")
    chapter(tmp_path, TIMED, name="build")
    assert [case.name for case in load(tmp_path)] == ["timed", "equal", "fails"]


def a_case(**changes: Any) -> Case:
    given = {
        "launcher": "mpirun",
        "command": "dp {ranks} {scaling}",
        "ranks": (1, 2, 4, 8),
        "quick": "--steps 2",
    }
    return Case("Toys", Path("/srv/01-toys/benchmark.toml"), **{"name": "dp", **given, **changes})


def test_timed_cases_run_up_to_the_cores() -> None:
    both = a_case(scalings=("strong", "weak"))
    chosen = [t.name for t in select([both], cores=2)]
    assert chosen == ["dp-strong-1", "dp-strong-2", "dp-weak-2"]
    assert [t.ranks for t in select([a_case(ranks=(16, 8))], cores=2)] == [8]
    assert [t.ranks for t in select([a_case(purpose="equality")], cores=2)] == [1, 2, 4, 8]


def test_quick_takes_one_run_of_each_case_and_no_memory() -> None:
    every = [
        a_case(scalings=("strong", "weak"), variants=("a", "b")),
        a_case(name="memory", purpose="memory"),
        a_case(name="equality", purpose="equality"),
    ]
    chosen = select(every, quick=True, cores=2)
    assert [t.name for t in chosen] == ["dp-a-strong-2", "equality-strong-8"]
    assert all(t.command.endswith(" --steps 2") for t in chosen)


def test_ranks_and_only_select() -> None:
    every = [a_case(), a_case(name="pp", ranks=(2, 3))]
    assert [t.name for t in select(every, ranks=[3, 8])] == ["dp-strong-8", "pp-strong-3"]
    assert [t.name for t in select(every, only=["p*", "*-1"], cores=2)] == [
        "dp-strong-1",
        "pp-strong-2",
    ]
    with pytest.raises(UsageError, match=r"no case runs with \[5\] ranks; they run with \[1, 2, 3, 4, 8\]"):
        select(every, ranks=[5])
    with pytest.raises(UsageError, match=r"--only tp\* matches no case; the cases are dp, pp"):
        select(every, only=["tp*"])
    with pytest.raises(
        UsageError, match=r"--only pp: its runs have \[2, 3\] ranks; give one of these as --ranks"
    ):
        select(every, only=["pp"], ranks=[8], quick=True)
    with pytest.raises(UsageError, match=r"--only \*-8: its runs have \[8\] ranks"):
        select(every, only=["*-8"], cores=2)
    with pytest.raises(UsageError, match=r"--only m matches no run of --quick, which makes one of each case"):
        select([*every, a_case(name="m", purpose="memory")], only=["m"], quick=True)


def test_commands_are_what_a_person_types() -> None:
    (task,) = select([a_case(ranks=(2,))])
    assert task.command == "mpirun -np 2 dp 2 strong"
    assert (
        benchmark_all.command_line(task, Path("/srv"))
        == "cd 01-toys && OMP_NUM_THREADS=1 mpirun -np 2 dp 2 strong"
    )
    (task,) = select([a_case(ranks=(2,), launcher="torchrun", folder="..")], quick=True)
    assert task.command == "torchrun --standalone --nproc_per_node=2 dp 2 strong --steps 2"
    assert benchmark_all.command_line(task, Path("/srv")) == f"OMP_NUM_THREADS=1 {task.command}"
    for launcher, words in (("torchrun", "python dp 2 strong"), ("mpirun", "dp 2 strong")):
        (task,) = select([a_case(ranks=(2,), launcher=launcher)], launch="srun --ntasks={ranks}")
        assert task.command == f"srun --ntasks=2 {words}"
    with pytest.raises(UsageError, match=r"--launch srun does not say how many; give {ranks}"):
        select([a_case()], launch="srun")
    tasks = select([a_case(ranks=(2,), command="dp --versions {variant}", variants=("naive", "ddp"))])
    assert [t.name for t in tasks] == ["dp-naive-strong-2", "dp-ddp-strong-2"]
    assert tasks[1].command == "mpirun -np 2 dp --versions ddp"


def test_the_cases_of_this_repository() -> None:
    every = load(ROOT)
    assert {case.launcher for case in every} >= {"mpirun", "torchrun"}
    for task in select(every, cores=4):
        assert task.folder.is_dir()
        program = next(word for word in task.command.split() if word.endswith(".py") or "/" in word)
        assert (task.folder / program).exists() or program.startswith("build/"), program
