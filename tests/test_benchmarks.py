"""The benchmark: its cases, how it runs them, what it computes, and the page that it writes.

Chapters here are folders with a benchmark.toml and one small program that pretends to be a lesson.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from common.benchmarks import benchmark_all, measures, report, runner, tables
from common.benchmarks.benchmark_all import Options
from common.benchmarks.cases import Case, load, select
from common.benchmarks.measures import Timing, speed_up
from common.watchdog import UsageError

ROOT = Path(__file__).resolve().parents[1]

LESSON = """
import argparse, json, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
for name in ("json", "ranks", "scaling", "fail", "sleep", "equal", "times"):
    parser.add_argument("--" + name)
o = parser.parse_args()
print("a table for people")
with open("calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:-2]) + chr(10))
if o.sleep:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({o.sleep})"])
if os.environ["OMP_NUM_THREADS"] != "1":
    sys.exit("threads")
if o.fail and not os.path.exists("repaired"):
    sys.exit("working" + chr(10) + "error: " + o.fail)
n = int(o.ranks or 1)
record = {"strategy": "dp", "implementation": "ours", "language": "pytorch", "ranks": n, "backend": "gloo",
          "dtype": "float32", "model": "toy", "tokens_per_step": 100 * (n if o.scaling == "weak" else 1),
          "flop_per_step": 2e9, "scaling": o.scaling or "strong", "communication_seconds": 0.1 if n > 1 else 0.0,
          "bytes_counted": 8, "bytes_formula": 8, "peak_memory_bytes": 5e6,
          "step_seconds": [float(t) for t in (o.times or "1").split(",")],
          "equal": {"yes": True, "no": False, None: None}[o.equal],
          "largest_difference": 1e-15 if o.equal else None}
with open(o.json, "a") as file:
    file.write(json.dumps(record) + chr(10))
sys.exit(o.equal == "no")
"""

TIMED = """
[[case]]
name = "timed"
launcher = "python"
command = "lesson.py --ranks {ranks} --scaling {scaling} --times 0.5,0.4,0.6"
ranks = [1, 2]
scalings = ["strong", "weak"]
"""
FAILS = """
[[case]]
name = "fails"
launcher = "python"
command = "lesson.py --fail 'no <b>GPU</b> here'"
ranks = [1]
"""
EQUAL = """
[[case]]
name = "equal"
launcher = "python"
command = "lesson.py --equal yes"
ranks = [3]
purpose = "equality"
"""


def chapter(root: Path, *cases: str, name: str = "01-toys", title: str = "Toys") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "lesson.py").write_text(LESSON)
    (folder / "benchmark.toml").write_text(f'title = "{title}"\n' + "".join(cases))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """run(option=...) benchmarks the chapters in tmp_path."""
    monkeypatch.setattr(benchmark_all, "machine", lambda: {"processor": "an abacus"})
    monkeypatch.setattr("common.benchmarks.plots.cores", lambda: 2)
    monkeypatch.setattr(runner, "GRACE", 0.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    return lambda **options: benchmark_all.main(Options(output=tmp_path / "out", **options), tmp_path)


def records(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "out/records.jsonl").read_text().splitlines()]


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


# ---- cases


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
        (TIMED.replace('["strong", "weak"]', '"strong"'), ["scalings = strong", "list"]),
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


def test_timed_cases_run_up_to_twice_the_cores() -> None:
    both = a_case(scalings=("strong", "weak"))
    chosen = [t.name for t in select([both], cores=2)]
    assert chosen == ["dp-strong-1", "dp-strong-2", "dp-strong-4", "dp-weak-2", "dp-weak-4"]
    assert [t.ranks for t in select([a_case(ranks=(16, 8))], cores=2)] == [8]
    assert [t.ranks for t in select([a_case(purpose="equality")], cores=2)] == [1, 2, 4, 8]


def test_ranks_and_only_select() -> None:
    every = [a_case(), a_case(name="pp", ranks=(2, 3))]
    assert [t.name for t in select(every, ranks=[3, 8])] == ["dp-strong-8", "pp-strong-3"]
    assert [t.name for t in select(every, only=["p*", "*-1"], cores=2)] == [
        "dp-strong-1",
        "pp-strong-2",
        "pp-strong-3",
    ]
    with pytest.raises(UsageError, match=r"no case runs with \[5\] ranks; they run with \[1, 2, 3, 4, 8\]"):
        select(every, ranks=[5])
    with pytest.raises(UsageError, match=r"--only tp\* matches no case; the cases are dp, pp"):
        select(every, only=["tp*"])


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


# ---- measures


def timing(ranks: int, seconds: float, **changes: Any) -> Timing:
    one = {"strategy": "dp", "language": "pytorch", "backend": "gloo", "dtype": "float32", "model": "toy"}
    times = (seconds, seconds / 2, seconds * 2)
    given = {"implementation": "ours", "step_seconds": times, "tokens_per_step": 100.0, "flop_per_step": 4e9}
    return Timing(ranks=ranks, **{**one, **given, **changes})


def test_median_spread_and_rates() -> None:
    t = timing(2, 0.5, communication_seconds=0.1)
    assert t.seconds == 0.5
    assert t.spread == pytest.approx(1.5)  # (1.0 - 0.25) / 0.5
    assert t.tokens_per_second == pytest.approx(200)
    assert t.gflops == pytest.approx(8)
    assert t.communication_share == pytest.approx(0.2)
    even = timing(1, 1, step_seconds=(1.0, 4.0, 2.0, 3.0))
    assert even.seconds == 2.5
    unknown = timing(1, 1, tokens_per_step=None, flop_per_step=None)
    assert (unknown.tokens_per_second, unknown.gflops, unknown.communication_share) == (None, None, None)


def test_speed_up_strong_and_weak() -> None:
    one = timing(1, 1.0)
    strong, weak = timing(2, 0.625), timing(4, 1.25, scaling="weak", tokens_per_step=400.0)
    among = [one, strong, weak]
    assert [speed_up(t, among) for t in among] == pytest.approx([1, 1.6, 3.2])


@pytest.mark.parametrize(
    "other",
    [
        {"implementation": "theirs"},
        {"language": "libtorch"},
        {"model": "other"},
        {"dtype": "float64"},
        {"tokens_per_step": 200.0},
        {"purpose": "equality"},
    ],
)
def test_speed_up_never_compares_different_things(other: dict[str, Any]) -> None:
    assert speed_up(timing(2, 0.5), [timing(1, 1.0, **other), timing(2, 0.5)]) is None


def test_speed_up_prefers_one_rank_of_the_same_backend() -> None:
    among = [timing(1, 3.0, backend="mpi"), timing(1, 1.0)]
    assert speed_up(timing(2, 0.5), among) == 2
    assert speed_up(timing(2, 0.5), among[:1]) == 6


def test_memory_is_that_of_the_implementation_alone() -> None:
    in_turn = [
        timing(2, 1.0, implementation=name, command="both", peak_memory_bytes=9e8)
        for name in ("ours", "theirs")
    ]
    own = timing(2, 1.0, command="one", peak_memory_bytes=5e8, purpose="memory")
    elsewhere = timing(4, 1.0, command="four", peak_memory_bytes=6e8, purpose="memory")
    every = [*in_turn, elsewhere, own]
    assert [measures.alone(t, every) for t in (*in_turn, own)] == [own, None, own]
    rows = tables.throughput(in_turn, every).rows
    assert [row.cells[-2] for row in rows] == ["500", tables.NONE]
    assert [list(row.commands) for row in rows] == [["both", "one"], ["both"]]


GOOD = dict.fromkeys(measures.TEXTS, "x") | {"ranks": 1, "step_seconds": [0.5]}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"step_seconds": []}, "step_seconds"),
        ({"step_seconds": [0.5, -1]}, "step_seconds"),
        ({"step_seconds": ["1"]}, "step_seconds"),
        ({"ranks": 0}, "ranks"),
        ({"scaling": "medium"}, "scaling"),
        ({"bytes_counted": "many"}, "bytes_counted"),
    ],
)
def test_a_bad_record_is_named(change: dict[str, Any], part: str) -> None:
    assert measures.problem(GOOD) == ""
    assert part in measures.problem(GOOD | change)
    assert "lacks 'model'" in measures.problem({k: v for k, v in GOOD.items() if k != "model"})
    assert measures.problem([])


def test_bytes_that_differ_from_the_formula_are_marked() -> None:
    right, wrong, unseen = (
        timing(2, 1.0, bytes_counted=counted, bytes_formula=8.0) for counted in (8.0, 9.0, None)
    )
    assert [row.bad for row in tables.communication([right, wrong, unseen]).rows] == [False, True, False]


def test_scaling_table_and_names() -> None:
    one, two = timing(1, 1.0), timing(2, 0.625)
    mpi = [timing(1, 1.0, backend="mpi"), timing(2, 0.5, backend="mpi")]
    table = tables.scaling([one, two, *mpi])
    assert [list(row.cells) for row in table.rows] == [
        ["ours · gloo", "strong", "1.00 (100%)", "1.60 (80%)"],
        ["ours · mpi", "strong", "1.00 (100%)", "2.00 (100%)"],
    ]


# ---- running


def test_a_whole_run(run: Callable[..., int], tmp_path: Path) -> None:
    folder = chapter(tmp_path, TIMED, EQUAL)
    assert run() == 0
    assert len(calls(folder)) == 4  # weak scaling with one rank is the strong one
    kept = records(tmp_path)
    assert [r["case"] for r in kept] == ["timed-strong-1", "timed-strong-2", "timed-weak-2", "equal-strong-3"]
    assert kept[2]["command"] == (
        "cd 01-toys && OMP_NUM_THREADS=1 python lesson.py --ranks 2 --scaling weak --times 0.5,0.4,0.6"
    )
    assert all(r["machine"] == {"processor": "an abacus"} and r["commit"] == "unknown" for r in kept)
    assert all(r["chapter"] == "Toys" and r["elapsed"] > 0 and r["date"] for r in kept)
    assert "a table for people" in (tmp_path / "out/logs/timed-strong-1.stdout").read_text()
    plots = {path.name for path in (tmp_path / "out/plots").iterdir()}
    assert {
        f"toys-1-{k}.{s}" for k in ("throughput", "scaling", "communication") for s in ("png", "svg")
    } <= plots


def test_a_failed_case_is_a_row_and_not_the_end(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chapter(tmp_path, FAILS, EQUAL)
    assert run() == 1
    assert [r.get("error") for r in records(tmp_path)] == ["error: no <b>GPU</b> here", None]
    page = (tmp_path / "out/report.html").read_text()
    assert "error: no &lt;b&gt;GPU&lt;/b&gt; here" in page
    assert "2 runs, 1 failed." in page
    assert "failed: error: no <b>GPU</b> here" in capsys.readouterr().out


def test_different_from_one_device_is_a_failure(run: Callable[..., int], tmp_path: Path) -> None:
    chapter(tmp_path, EQUAL.replace("yes", "no"), TIMED)
    assert run() == 1
    assert records(tmp_path)[0]["equal"] is False
    page = (tmp_path / "out/report.html").read_text()
    assert "Different from one device: ours." in page
    assert "no, 1.0e-15" in page


def test_resume_runs_what_is_missing_or_failed(run: Callable[..., int], tmp_path: Path) -> None:
    folder = chapter(tmp_path, TIMED, FAILS)
    assert run(only=("*-1",)) == 1
    assert len(calls(folder)) == 2
    with (tmp_path / "out/records.jsonl").open("a") as file:
        file.write('{"cut sho')  # by a machine that went down
    (folder / "repaired").touch()
    assert run(resume=True) == 0
    assert len(calls(folder)) == 5
    assert sorted(r["case"] for r in records(tmp_path)) == [
        "fails-strong-1",
        "timed-strong-1",
        "timed-strong-2",
        "timed-weak-2",
    ]
    assert run(resume=True) == 0
    assert len(calls(folder)) == 5
    assert run(only=("*-1",)) == 0  # without --resume it begins anew
    assert len(records(tmp_path)) == 2


def test_a_case_that_takes_too_long_is_ended(run: Callable[..., int], tmp_path: Path) -> None:
    chapter(tmp_path, EQUAL.replace("--equal yes", "--sleep 60"))
    start = time.monotonic()
    assert run(timeout=0.5) == 1
    assert time.monotonic() - start < 30
    assert records(tmp_path)[0]["error"] == "not done after 0.5 s"
    assert not [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path / "01-toys")]


def test_no_record_no_program_no_folder(run: Callable[..., int], tmp_path: Path) -> None:
    silent = FAILS.replace("fails", "silent").replace("lesson.py --fail 'no <b>GPU</b> here'", "-c pass")
    lost = FAILS.replace("fails", "lost") + 'folder = "nowhere"\n'
    bad = FAILS.replace("fails", "bad").replace(
        "lesson.py --fail 'no <b>GPU</b> here'", "lesson.py --times 1,-1"
    )
    chapter(tmp_path, silent, lost, bad)
    assert run() == 1
    errors = [r["error"] for r in records(tmp_path)]
    assert errors[0] == "it wrote no record"
    assert "cannot be started" in errors[1]
    assert errors[2] == "its record 1 has no positive step_seconds"


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("Traceback (most recent call last):\n  File\nValueError: odd\n\n", "ValueError: odd"),
        (
            "dp_mpi: --batch 1 is too small\n"
            + "-" * 74
            + "\nprterun detected that one or more\n"
            + "-" * 74
            + "\n",
            "dp_mpi: --batch 1 is too small",
        ),
        (
            "error: --nproc 3\nE1121 10:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:1] failed\n"
            "Traceback (most recent call last):\ntorch.ChildFailedError:\n======\n",
            "error: --nproc 3",
        ),
        ("-" * 74 + "\nprterun could not find dp_mpi\n" + "-" * 74 + "\n", "prterun could not find dp_mpi"),
        ("", ""),
    ],
)
def test_last_error_is_the_program_s_own(stderr: str, line: str) -> None:
    assert runner.last_error(stderr) == line


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    script = ROOT / "common/benchmarks/benchmark_all.py"
    command = [sys.executable, str(script), "--only", "nothing*", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --only nothing* matches no case; the cases are ")
    assert done.stderr.count("\n") == 1


def test_an_output_that_cannot_be_written(run: Callable[..., int], tmp_path: Path) -> None:
    folder = chapter(tmp_path, TIMED)
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UsageError, match=r"--output .* cannot be written"):
        run()
    assert not (folder / "calls").exists()


def test_remaining_time_counts_down_from_the_cases_done() -> None:
    def shown(completed: int, spent: float, elapsed: float) -> str:
        task: Any = SimpleNamespace(completed=completed, total=5, elapsed=elapsed, fields={"spent": spent})
        return benchmark_all.Remaining().render(task).plain

    assert shown(0, 0, 9) == "-:--:-- left"
    assert shown(2, 20, 20) == "0:00:30 left"
    assert shown(2, 20, 26) == "0:00:24 left"
    assert shown(2, 20, 99) == "0:00:00 left"


# ---- the page


def test_the_page_needs_nothing_else_and_says_everything(run: Callable[..., int], tmp_path: Path) -> None:
    chapter(tmp_path, TIMED, EQUAL, FAILS)
    run(picture=tmp_path / "images/main.png")
    page = (tmp_path / "out/report.html").read_text()
    assert set(re.findall(r"""(?:src|href)\s*=\s*["']?([^"' >]{0,1})""", page)) == {"#"}
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert not re.search(r"<(script|link|img|iframe|object)|@import", page)
    assert set(re.findall(r"https?://[\w./]+", page)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert page.count("<svg ") == 3
    targets = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    ids = re.findall(r'id="([^"]+)"', page)
    assert targets <= set(ids)
    assert len(ids) == len(set(ids))
    for record in records(tmp_path):
        assert f"<code>{record['command']}</code>" in html.unescape(page)
    for shown in (
        "an abacus",
        "Equal to one device: ours",
        "500",
        "40%",
        "200",
        "2.00",
        "yes, 1.0e-15",
        "strong",
    ):
        assert shown in page, shown
    assert (tmp_path / "images/main.png").stat().st_size > 1000


def test_the_page_of_bandwidths(tmp_path: Path) -> None:
    kept = {
        "chapter": "Wires",
        "case": "w-2",
        "command": "demo",
        "commit": "c",
        "date": "d" * 20,
        "machine": {},
    }
    sweep = [
        {
            "primitive": p,
            "backend": "gloo",
            "ranks": 2,
            "bytes": size,
            "seconds": [0.001, 0.002, 0.003],
            **kept,
        }
        | {"algorithm_bandwidth": 2e9, "bus_bandwidth": 1e9, "correct": p == "all-reduce"}
        for p in ("all-reduce", "broadcast")
        for size in (2**20, 2**22)
    ]
    assert all(measures.problem(record) == "" for record in sweep)
    page = report.write(sweep, tmp_path).read_text()
    assert page.count("<svg ") == 1
    assert page.count('<tr class="bad">') == 2
    assert "1,048,576" in page
