"""The figures that the report computes from records: medians, speed-ups, marked rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.benchmarks import measures, peaks, tables
from common.benchmarks.measures import Timing, speed_up


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


GOOD = dict.fromkeys(measures.TIMED, "x") | {"ranks": 1, "step_seconds": [0.5]}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"step_seconds": []}, "step_seconds"),
        ({"step_seconds": [0.5, -1]}, "step_seconds"),
        ({"step_seconds": ["1"]}, "step_seconds"),
        ({"ranks": 0}, "ranks"),
        ({"scaling": "medium"}, "scaling"),
        ({"bytes_counted": "many"}, "bytes_counted"),
        ({"step_seconds": [float("nan")]}, "step_seconds"),
        ({"step_seconds": [10**400]}, "step_seconds"),
        ({"ranks": "two"}, "ranks"),
        ({"model": None}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"peaks": {"torch": 1.0}}, "peaks"),
        ({"seconds_by_axis": []}, "seconds_by_axis"),
        ({"equal": "yes"}, "equal"),
        ({"error": 5, "scaling": "strong"}, "error"),
        ({"error": "none"}, "lacks 'scaling'"),
        ({"bus_bandwidth": 1.0}, "lacks 'primitive'"),
        ({"timelines": {}}, "lacks 'schedule'"),
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


def test_share_of_the_peak_of_its_own_blas() -> None:
    peaks = {"torch": {"float32": 8e9, "float64": 4e9}, "C++": {"float32": 16e9}}
    runs = [  # 4 GFLOP a second, of at most two cores
        timing(ranks, 1.0, language=language, dtype=dtype, backend=backend, peaks=peaks, cores=2)
        for language, dtype, ranks, backend in (
            ("pytorch", "float32", 1, "gloo"),
            ("libtorch", "float64", 2, "mpi"),
            ("cpp-mpi", "float32", 4, "mpi"),
            ("cpp-mpi", "float64", 1, "mpi"),
            ("pytorch", "float32", 1, "nccl"),
        )
    ]
    assert [t.peak_share for t in runs] == [0.5, 0.5, 0.125, None, None]
    assert timing(1, 1.0).peak_share is None
    table = tables.throughput(runs[:1], runs)
    assert table.rows[0].cells[table.heads.index(">share of peak")] == "50%"


@pytest.mark.parametrize(("cpp", "says"), [(8.7e9, ""), (8.9e9, "C++ on MPI"), (7.3e9, ""), (7.2e9, "torch")])
def test_two_blases_that_differ_by_a_tenth_are_one_line_above_the_table(cpp: float, says: str) -> None:
    peaks = {"torch": {"float32": 8e9}, "C++": {"float32": cpp}}
    both = [
        timing(1, 1.0, language=language, dtype="float32", peaks=peaks) for language in ("pytorch", "cpp-mpi")
    ]
    note = tables.throughput(both, both).note
    assert note.startswith(f"On one core the BLAS of {says} reaches " if says else "")
    assert bool(note) == bool(says)
    assert "\n" not in note
    assert tables.throughput(both[:1], both).note == ""


def test_peaks_are_measured_of_each_blas_and_type() -> None:
    found = peaks.measure(size=32)
    assert found.keys() >= {"torch"}
    assert all(rates.keys() == {"float32", "float64"} for rates in found.values())
    assert all(rate > 0 for rates in found.values() for rate in rates.values())


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("""print('{"torch": {}}')""", {"torch": {}}),
        ("print('no')", {}),
        ("1 / 0", {}),
        ("import time; time.sleep(600)", {}),
    ],
)
def test_peaks_that_cannot_be_measured_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: peaks.Peaks
) -> None:
    """Peaks are None in an environment with no program called python."""
    (tmp_path / "peaks.py").write_text(script)
    monkeypatch.setattr(peaks, "__file__", str(tmp_path / "peaks.py"))
    assert peaks.measured({"PATH": ""}, 2.0 if "sleep" in script else 60.0) == found


def test_a_column_without_a_value_is_left_out() -> None:
    rows = [tables.Row(["a", tables.NONE, tables.NONE]), tables.Row(["b", "1", tables.NONE], bad=True)]
    shown = tables.Table("t", ("name", ">some", ">none"), rows).without_empty_columns()
    assert shown.heads == ["name", ">some"]
    assert [(row.cells, row.bad) for row in shown.rows] == [(["a", tables.NONE], False), (["b", "1"], True)]
