"""The benchmark runs its cases, continues after failures, and writes a self-contained page."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from toys import EQUAL, FAILS, TIMED, chapter

from common.benchmarks import benchmark_all, measures, plots, report, runner
from common.benchmarks.benchmark_all import Options
from common.benchmarks.cases import Task
from common.errors import UsageError
from common.launch import forked

FULL = Path("/dev/full")
PEAKS = {"torch": {"float32": 4e9}, "C++": {"float32": 8e9}}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return run(option=...), which benchmarks the chapters in tmp_path."""
    monkeypatch.setattr(benchmark_all, "machine", lambda: {"processor": "an abacus"})
    monkeypatch.setattr("common.benchmarks.plots.cores", lambda: 2)
    monkeypatch.setattr("common.benchmarks.peaks.measured", lambda *given: PEAKS)
    monkeypatch.setattr(runner, "GRACE", 0.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    return lambda **options: benchmark_all.main(
        Options(tmp_path / "out", **{"fresh": True, **options}), tmp_path
    )


def records(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "out/records.jsonl").read_text().splitlines()]


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_a_whole_run(run: Callable[..., int], tmp_path: Path) -> None:
    folder = chapter(tmp_path, TIMED, EQUAL)
    assert run() == 0
    assert len(calls(folder)) == 4  # weak scaling with one rank is the strong one
    kept = records(tmp_path)
    assert [r["case"] for r in kept] == ["timed-strong-1", "timed-strong-2", "timed-weak-2", "equal-strong-3"]
    assert kept[2]["command"] == (
        "cd 01-toys && OMP_NUM_THREADS=1 python lesson.py --ranks 2 --scaling weak --times 0.5,0.4,0.6"
    )
    assert all(
        r["machine"] == {"processor": "an abacus"} and r["peaks"] == PEAKS and r["commit"] == "unknown"
        for r in kept
    )
    assert all(r["chapter"] == "Toys" and r["elapsed"] > 0 and r["date"] for r in kept)
    assert "a table for people" in (tmp_path / "out/logs/timed-strong-1.stdout").read_text()
    plots = {path.name for path in (tmp_path / "out/plots").iterdir()}
    assert {
        f"toys-1-{k}.{s}" for k in ("throughput", "scaling", "communication") for s in ("png", "svg")
    } <= plots


@pytest.mark.skipif(not forked.possible(), reason="no pidfd_open")
def test_scripts_run_in_forks_of_one_python_but_those_that_measure_memory(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_all, "PRELOAD", ["json"])
    chapter(tmp_path, TIMED, EQUAL.replace('purpose = "equality"', 'purpose = "memory"'))

    def parents(fresh: bool) -> list[int]:
        assert run(fresh=fresh) == 0
        return [r["parent"] for r in records(tmp_path)]

    mine = os.getpid()
    assert parents(fresh=True) == [mine] * 4
    server, *forks, alone = parents(fresh=False)
    assert server != mine
    assert (forks, alone) == ([server] * 2, mine)
    monkeypatch.setattr(forked, "possible", lambda: False)
    assert parents(fresh=False) == [mine] * 4


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
    chapter(tmp_path, EQUAL.replace("--equal yes", "--sleep 1000"))
    assert run(timeout=0.5) == 1
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
    assert errors[2] == "its record 1 has step_seconds = [1.0, -1.0]"


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
    script = Path(benchmark_all.__file__)
    command = [sys.executable, str(script), "--only", "nothing*", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --only nothing* matches no case; the cases are ")
    assert done.stderr.count("\n") == 1


def test_an_output_that_cannot_be_written(run: Callable[..., int], tmp_path: Path) -> None:
    folder = chapter(tmp_path, TIMED)
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UsageError, match=r"--output .* cannot be written"):
        run()
    assert not (folder / "calls").exists()


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("at", ["records.jsonl", "report.html"])
def test_a_full_disk_is_one_line_and_keeps_what_was_measured(
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: str,
) -> None:
    """If a file cannot be written from the second case on, one line says so, and earlier records stay."""
    folder, run_one, full = chapter(tmp_path, TIMED), runner.run, tmp_path / "out" / at

    def fill(task: Task, *given: Any) -> runner.Outcome:
        if task.ranks == 2 and not full.is_symlink():
            if full.exists():
                full.rename(tmp_path / "out/kept")
            full.symlink_to(FULL)
        return run_one(task, *given)

    monkeypatch.setattr(runner, "run", fill)
    assert run() == 1
    said, out = capsys.readouterr(), tmp_path / "out"
    assert said.err == (
        f"error: {out} cannot be written: No space left on device; "
        f"{out}/records.jsonl has what was stored, --resume goes on from there\n"
    )
    assert re.search(r"ours .* 2 ", said.out)  # the terminal shows what could not be stored
    assert len(calls(folder)) == (2 if at == "records.jsonl" else 3)
    kept = (out / ("kept" if at == "records.jsonl" else "records.jsonl")).read_text()
    assert kept.count("\n") == (1 if at == "records.jsonl" else 3)


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_a_disk_that_is_full_from_the_start_keeps_the_earlier_records(
    run: Callable[..., int], tmp_path: Path
) -> None:
    folder = chapter(tmp_path, TIMED)
    assert run(only=("*-1",)) == 0
    earlier = records(tmp_path)
    (tmp_path / "out/records.part").symlink_to(FULL)
    with pytest.raises(UsageError, match=r"--output .* cannot be written: No space left"):
        run(resume=True)
    assert records(tmp_path) == earlier
    assert len(calls(folder)) == 1


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
        '<summary class="good">✓ Equal to one device: 1 implementation; largest relative difference 1.0e-15',
        "</summary><p>ours</p>",
        "100%",  # 4 GFLOP/s of a core's 4, and of two cores' 8
        "500",
        "40%",
        "200",
        "2.00",
        "yes, 1.0e-15",
        "strong",
    ):
        assert shown in page, shown
    assert (tmp_path / "images/main.png").stat().st_size > 1000


KEPT = {"chapter": "Wires", "case": "w-2", "command": "demo", "commit": "c", "date": "d" * 20, "machine": {}}


def sweep(backend: str, primitives: Sequence[str]) -> list[dict[str, Any]]:
    """Return records of primitives at two sizes; those of the first primitive are wrong."""
    rates = {"algorithm_bandwidth": 2e9, "bus_bandwidth": 1e9}
    given = {"backend": backend, "ranks": 2, "seconds": [0.001, 0.002, 0.003], **KEPT, **rates}
    return [
        {"primitive": p, "bytes": size, "correct": p != primitives[0], **given}
        for p in primitives
        for size in (2**20, 2**22)
    ]


def test_the_page_of_bandwidths(tmp_path: Path) -> None:
    records = sweep("gloo", ("broadcast", "all-reduce"))
    assert all(measures.problem(record) == "" for record in records)
    page = report.write(records, tmp_path).read_text()
    assert page.count("<svg ") == 1
    assert page.count('<tr class="bad">') == 2
    assert "1,048,576" in page


def test_who_does_a_collective_best_is_a_plot_with_the_copy_as_limit(tmp_path: Path) -> None:
    who = ("gloo", "fived", "copy")
    records = sweep("mpi", [f"{name}, {one}" for name in ("all-reduce", "broadcast") for one in who])
    drawn = plots.of_bandwidth([*records, *sweep("gloo", ("all-reduce",))], "wires")
    assert [plot.name for plot in drawn] == [
        "wires-bandwidth-all-reduce-mpi-2",
        "wires-bandwidth-broadcast-mpi-2",
        "wires-bandwidth-collectives-gloo-2",
    ]
    axes = Figure().subplots()
    drawn[0].draw(axes)
    assert [line.get_label() for line in axes.lines] == ["gloo", "fived", "memory copy"]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1, 1], [1, 1], [2, 2]]
    page = report.write(records, tmp_path).read_text()
    assert page.count("<svg ") == 2


def test_the_page_of_schedules(tmp_path: Path) -> None:
    """Simulated timelines stand above measured ones in the same colours, with the bubble in a table."""
    rows = {"rank 0": [[0.0, 0.1, "F", "0"], [0.3, 0.6, "B", "0"]], "rank 1": [[0.1, 0.2, "F", "0"]]}
    shares = {"formula": None, "simulated": 0.25, "with measured times": 0.26, "measured": 0.275}
    given = {"model": "gpt2-tiny", "dtype": "float64", "backend": "gloo", "ranks": 2, "micro_batches": 4}
    lines = {"ours, simulated": rows, "ours, measured": {**rows, "rank 1": [[0.2, 0.3, "B", "0"]]}}
    record = {"schedule": "ours", **given, "bubble": shares, "timelines": lines, **KEPT, "purpose": "time"}
    assert measures.problem(record) == ""
    assert measures.problem({key: value for key, value in record.items() if key != "bubble"})
    (drawn,) = plots.of_schedules([record], "pipes")
    assert drawn.name == "pipes-timeline-1-ours"
    axes = Figure().subplots(2)
    drawn.draw(*axes)
    assert [one.get_title() for one in axes] == list(lines)
    first, second = ([text.get_text() for text in one.get_legend().get_texts()] for one in axes)
    assert first == second == ["F", "B"]
    others = [{**record, "ranks": 1}, {**record, "purpose": "equality"}]  # no idle time; a tiny model
    page = report.write([record, *others, record], tmp_path).read_text()
    assert page.count("<svg ") == 2
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for shown in ("25.0%", "26.0%", "27.5%"):
        assert shown in page
    assert '<th class="number">formula' not in page


def test_the_first_sentence_says_it_all_and_names_are_folded(tmp_path: Path) -> None:
    def of(name: str, equal: bool | None) -> dict[str, Any]:
        given = {
            "strategy": "dp",
            "language": "pytorch",
            "backend": "gloo",
            "dtype": "float64",
            "model": "toy",
        }
        found = {"equal": equal, "largest_difference": 1e-14, "step_seconds": [1.0]}
        return {**KEPT, **given, **found, "case": name, "ranks": 2, "implementation": name, "purpose": "time"}

    assert [v.sentence for v in report.verdicts([of("a", None)])] == ["1 run, 0 failed."]
    good = [of("a", True), of("b", True), {**KEPT, "case": "c", "error": "none"}]
    assert report.verdicts(good)[0] == (False, "3 runs, 1 failed.", "")
    first, second = report.verdicts(good[:2])
    assert first == (True, "2 runs, 0 failed, all equal to one device.", "")
    assert second.sentence.startswith("Equal to one device: 2 implementations; ")
    assert second.more == "a, b"
    first, second, third = report.verdicts([*good[:1], of("d", False)])
    assert first.sentence == "2 runs, 0 failed."
    assert second == (False, "Different from one device: d.", "")
    assert third.more == "a"
    page = report.write([of("a", True)], tmp_path).read_text()
    assert "exposed communication" not in page.split("<h2")[1]  # not measured
    assert "largest relative difference" in page.split("<h2")[1]


def test_names_are_text_and_no_html(tmp_path: Path) -> None:
    """Names with markup are shown as text in sentences, in tables and in plots."""
    name = '<script>alert("a")</script>'
    given = dict(strategy=name, language=name, backend=name, dtype=name, model=name, implementation=name)
    shown = {**KEPT, **given, "chapter": name, "case": name, "command": name, "purpose": "time"}
    shown |= {"ranks": 2, "scaling": "strong"}
    timed = {**shown, "equal": False, "largest_difference": 1e-14, "step_seconds": [1.0]}
    page = report.write([timed, {**shown, "error": name}, *sweep(name, (name,))], tmp_path).read_text()
    assert page.count("&lt;script&gt;") > 10
    assert "<script" not in page


def test_a_pair_of_scaling_plots_is_as_wide_as_two(tmp_path: Path) -> None:
    sizes = {}
    for columns in (1, 2):
        plots.Plot(f"p{columns}", "", lambda *axes: None, columns).save(tmp_path)
        sizes[columns] = re.search(r'viewBox="0 0 (\S+) ', (tmp_path / f"p{columns}.svg").read_text())
    narrow, wide = (float(found[1]) for found in sizes.values() if found)
    assert wide == 2 * narrow


def test_the_picture_has_a_panel_per_scaling_in_the_same_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, str, dict[int, float]]] = []

    def lines(
        axes: Axes, rates: dict[str, dict[int, float]], *, unit: str, title: str, **kwargs: Any
    ) -> None:
        drawn.append((title.replace("\n", " "), unit, *rates.values()))

    monkeypatch.setattr("common.utils.visualizer.throughput_lines", lines)
    given = dict.fromkeys(measures.TIMED, "x") | {"step_seconds": (1.0,)}
    runs = [
        measures.Timing(**given | {"ranks": ranks, "scaling": scaling, "tokens_per_step": tokens})
        for ranks, scaling, tokens in ((1, "strong", 1024), (2, "strong", 1024), (2, "weak", 2048))
    ]
    strong = "Strong scaling: 1,024 tokens per step, divided among the ranks"
    weak = "Weak scaling: 1,024 tokens per rank and step"
    plots.picture(runs, tmp_path / "both.svg")
    assert drawn == [
        (strong, "tokens per second", {1: 1024, 2: 1024}),
        (weak, "tokens per second", {1: 1024, 2: 2048}),
    ]
    drawn.clear()
    plots.picture(runs[:2], tmp_path / "strong.svg")
    plots.picture(runs[:1], tmp_path / "alone.svg")
    assert [title for title, *_ in drawn] == [strong, strong]
    assert (tmp_path / "both.svg").read_text().startswith("<?xml")
