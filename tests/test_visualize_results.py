"""Stored results are drawn again unchanged, compared side by side, and produced on several hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toys import EQUAL, FAILS, TIMED, chapter

from common.benchmarks import benchmark_all, measures, report
from common.errors import UsageError
from scripts import visualize_results
from scripts.visualize_results import Options

ROOT = Path(__file__).resolve().parents[1]


def drawn(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (*folder.glob("plots/*"), folder / "report.html")}


def test_drawn_again_it_is_what_benchmark_all_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results drawn on another machine with other cores, from the records alone, equal benchmark_all's."""
    monkeypatch.setattr("common.benchmarks.plots.cores", lambda: 1)
    monkeypatch.setattr("common.benchmarks.peaks.measured", lambda *given: {})
    chapter(tmp_path, TIMED, EQUAL, FAILS)
    results, copy = tmp_path / "out", tmp_path / "copy"
    options = benchmark_all.Options(output=results, ranks=(1, 2, 3), fresh=True)
    assert benchmark_all.main(options, tmp_path) == 1
    said = capsys.readouterr().out.replace(str(results), "here")
    monkeypatch.setattr("common.benchmarks.plots.cores", lambda: 64)
    copy.mkdir()
    (copy / "records.jsonl").write_bytes((results / "records.jsonl").read_bytes())
    assert visualize_results.main(Options(copy, picture=tmp_path / "picture.png")) == 0
    assert len(drawn(results)) == 7  # three plots in two forms, and the page
    assert drawn(copy) == drawn(results)
    again = capsys.readouterr().out.replace(str(copy), "here")
    assert "Throughput: toy" in again
    assert said.endswith(again)  # before that, a line for each case
    assert (tmp_path / "picture.png").stat().st_size > 1000


def record(case: str, seconds: list[float], **changes: Any) -> dict[str, Any]:
    text = {"strategy": "dp", "implementation": "ours", "language": "pytorch", "backend": "gloo"}
    kept = {
        "chapter": "Toys",
        "command": f"run {case}",
        "commit": "c",
        "date": "d" * 20,
        "machine": {"at": case},
    }
    given = {"case": case, "ranks": 2, "dtype": "float32", "model": "toy", "step_seconds": seconds}
    return {**text, **kept, **given, "purpose": "time", "tokens_per_step": 100, **changes}


def write(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write(
        tmp_path / "first",
        record("same", [1.0, 1.1, 0.9]),
        record("slower", [1.0, 1.1, 0.9]),
        record("faster", [1.0, 1.1, 0.9]),
        record("other-work", [1.0], tokens_per_step=100),
        record("proof", [1.0], purpose="equality"),
    )
    second = write(
        tmp_path / "second",
        record("faster", [0.5, 0.8, 0.4]),
        record("slower", [1.2, 1.3, 2.0]),
        record("same", [1.2, 1.3, 1.05]),  # a step of it was as fast as the first run's slowest
        record("other-work", [1.0], tokens_per_step=200),
    )
    assert visualize_results.main(Options(first, compare=second)) == 1
    shown = capsys.readouterr().out
    lines = [line.replace("│", " ").split() for line in shown.splitlines() if line.startswith("│")]
    assert lines == [
        ["ours", "2", "strong", "1,000", "1,200", "1.20", "0.95", "1.44"],
        ["ours", "2", "strong", "1,000", "1,300", "1.30", "1.09", "2.22", "slower"],
        ["ours", "2", "strong", "1,000", "500", "0.50", "0.36", "0.89", "faster"],
    ]
    page = (first / "comparison.html").read_text()
    assert "3 timings are in both runs, 1 in one only." in page
    assert "The second run is slower beyond the spread: slower (ours)." in page
    assert "Timed in one of the runs only: other-work (ours)." in page
    assert page.count('<tr class="bad">') == 1
    for command in ("run same", "run slower", "run faster"):
        assert f"<code>{command}</code>" in page
    assert "first run, at" in page
    assert visualize_results.main(Options(second, compare=first, output=tmp_path / "new")) == 1
    assert visualize_results.main(Options(first, compare=first, output=tmp_path / "new")) == 0
    (pair,) = measures.pairs([record("a", [2.0, 4.0])], [record("a", [3.0])])[0]
    assert (pair.ratio, pair.bounds, pair.verdict) == (1.0, (0.75, 1.5), "")


def test_two_blases_are_one_line_above_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line above the table names both BLAS rates, in terminal and page; markup in names is text."""
    given = {"model": "[/]", "peaks": {"torch": {"float32": 8e9}, "C++": {"float32": 4e9}}}
    both = [record(name, [1.0], language=name, **given) for name in ("pytorch", "cpp-mpi")]
    folder = write(tmp_path / "one", *both)
    assert visualize_results.main(Options(folder)) == 0
    note, shown = "On one core the BLAS of torch reaches ", capsys.readouterr().out
    assert shown.startswith(note)
    assert "Throughput: [/]" in shown
    assert note in (folder / "report.html").read_text()


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path) -> None:
    one = write(tmp_path / "one", record("same", [1.0]))
    for options, says in (
        (Options(tmp_path / "none"), r"none/records.jsonl holds no record; make benchmark writes results/"),
        (Options(one, compare=tmp_path), r"records.jsonl holds no record"),
        (
            Options(one, output=one / "records.jsonl"),
            r"--output .*records.jsonl cannot be written: File exists",
        ),
    ):
        with pytest.raises(UsageError, match=says):
            visualize_results.main(options)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"\xff\xfe", "is not JSON"),
        pytest.param(b"[" * 200_000, "is not JSON", id="deep"),
        (b"[1]", "is not an object"),
        (b'{"chapter": "a", "case": "b", "command": "c"}', "lacks 'purpose'"),
        ({"commit": None}, "has commit = None"),
        ({"command": ["x"]}, "has command = ['x']"),
        ({"machine": None}, "has machine = None"),
        ({"machine": {"cores": 2}}, "has machine = {'cores': 2}"),
        ({"date": 5}, "has date = 5"),
        ({"step_seconds": []}, "has step_seconds = []"),
        ({"step_seconds": ["a"]}, "has step_seconds = ['a']"),
        ({"chapter": None}, "has chapter = None"),
    ],
)
def test_a_damaged_record_is_left_out_and_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes | dict[str, Any], says: str
) -> None:
    file = write(tmp_path / "one", record("same", [1.0])) / "records.jsonl"
    bad = json.dumps(record("bad", [1.0]) | line).encode() if isinstance(line, dict) else line
    file.write_bytes(bad + b"\n" + file.read_bytes() + bad[:9])
    kept = report.read(file)
    assert [r["case"] for r in kept] == ["same"]
    report.write(kept, tmp_path)
    said = f"{file}: 2 damaged records left out; the first: record 1 {says}\n"
    assert capsys.readouterr() == ("", said)


def cluster(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/benchmark_cluster.sh, with the programs in tmp_path first on the PATH."""
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "VIRTUAL_ENV": "/somewhere", **variables}
    script = ROOT / "scripts" / "benchmark_cluster.sh"
    return subprocess.run(
        [script, *arguments], capture_output=True, text=True, timeout=240, env=env, cwd=tmp_path
    )


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_benchmark_over_a_file_of_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    chosen = ("--only", "dp_matmul_mpi-equality", "--output", str(tmp_path / "out"))
    done = cluster(tmp_path, "hosts", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == f"{os.uname().nodename}: 2 ranks"
    kept = report.read(tmp_path / "out" / "records.jsonl")
    assert all(r["equal"] and r["cores"] == 2 for r in kept)
    assert f"mpirun --hostfile {tmp_path}/hosts --map-by slot:oversubscribe" in kept[0]["command"]
    assert kept[0]["command"].endswith(" -np 3 build/bin/dp_matmul_mpi")


def test_the_benchmark_under_slurm_or_alone(tmp_path: Path) -> None:
    """The script runs the benchmark under Slurm or alone; srun and python only print their arguments."""
    program(tmp_path / "python", 'echo "python $*"')
    program(tmp_path / "srun", '[ "$1" = --mpi=list ] && echo "none pmix" && exit; printf "a\\nb\\na\\n"')
    benchmark = f"{ROOT}/scripts/../common/benchmarks/benchmark_all.py"
    assert cluster(tmp_path, "--quick", SLURM_JOB_ID="3").stdout.splitlines() == [
        "a: 2 ranks",
        "b: 1 ranks",
        f"python {benchmark} --launch srun --mpi=pmix --ntasks={{ranks}} --cores 3 --quick",
    ]
    alone = cluster(tmp_path, "--only", "dp_*", SLURM_JOB_ID="").stdout.splitlines()
    assert alone[0].startswith(f"one host: {os.uname().nodename}, since no file of hosts is given")
    assert alone[1:] == [f"python {benchmark} --only dp_*"]
    program(tmp_path / "srun", "echo none")
    for arguments, variables, says in (
        ([], {"SLURM_JOB_ID": "3"}, "this Slurm has no PMIx (srun --mpi=list)"),
        (["nothing"], {}, "there is no file of hosts nothing; write one with a line for each"),
    ):
        done = cluster(tmp_path, *arguments, **variables)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert says in done.stderr
