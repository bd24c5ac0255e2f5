"""The tables that find a slow part: a trace's operators by rank, and the steps of a run with other options in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import ALONE, options

from common import comm
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.utils import operators
from common.utils.operators import read_trace, times_of
from common.utils.profiler import profile

import hybrid_in_turn
from hybrid_in_turn import AS_GIVEN, Options
from hybrid_options import parse
from hybrid_trainer import start

TRACED = 20  # products


def event(
    name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 7, pid: int = 0
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "pid": pid}


def test_an_operator_is_without_those_that_it_calls(tmp_path: Path) -> None:
    events = [
        event("profile", 1000, 9000, "user_annotation"),
        event("aten::before", 0, 900),  # the block has not begun
        event("aten::linear", 1000, 4000),
        event("aten::t", 1000, 500),
        event("aten::addmm", 1500, 3000),
        event("_Wait", 5000, 3000),  # no operator: its time is that of what is inside it
        event("aten::mm", 5500, 1000),
        event("c10d::allreduce_", 6500, 1500),
        event("aten::copy_", 7000, 250),  # inside the call
        event("exposed", 6500, 1500, "exposed", 1),
        event("aten::mm", 2000, 1000, tid=8),  # of another thread
        event("profile", 1000, 2000, "user_annotation", 9, 1),
        event("aten::mm", 1500, 500, tid=9, pid=1),
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "thread_name"}]}))
    ranks = times_of(read_trace(file))
    of_0 = {"aten::linear": 0.5, "aten::t": 0.5, "aten::addmm": 3.0, "aten::mm": 1.0}
    assert ranks[0].operators == of_0
    assert (ranks[0].exposed, ranks[0].total, ranks[1].total) == (1.5, 9.0, 2.0)
    assert ranks[1].operators == {"aten::mm": 0.5}
    rows = operators.rows(ranks, 2)
    assert rows[:2] == [("aten::addmm", "1", [3.0, 0.0]), ("aten::mm", "1", [1.0, 0.5])]
    assert rows[2:] == [
        ("2 others", "", [1.0, 0.0]),
        ("exposed communication", "", [1.5, 0.0]),
        ("idle", "", [2.5, 1.5]),
        ("total", "", [9.0, 2.0]),
    ]


def traced(rt: Runtime, folder: Path) -> tuple[float, float]:
    """Trace products and sums; return this rank's seconds of compute and of exposed communication."""
    group, x = Mesh(rt.world, dp=2).group("dp"), torch.ones(200, 200)
    with profile(rt, folder) as report:
        for _ in range(TRACED):
            x = torch.mm(x, x) / 200
            comm.all_reduce(x, group)
            x = x / 2
    return report.ranks[rt.rank].compute, report.ranks[rt.rank].exposed


def test_the_columns_are_the_profilers_classes(tmp_path: Path) -> None:
    found = spawn(traced, 2, tmp_path)
    ranks = times_of(read_trace(tmp_path / "trace.json"))
    for (compute, exposed), times in zip(found, ranks.values(), strict=True):
        assert sum(times.operators.values()) == pytest.approx(1e3 * compute, rel=1e-3)
        assert times.exposed == pytest.approx(1e3 * exposed, rel=1e-3)
        assert times.calls["aten::mm"] == TRACED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read --file .*: No such file"),
        ("[", "is not a trace"),
        ("{}", "is not a trace"),
        ('{"traceEvents": [{"ph": "X", "name": "a"}]}', "has no block"),
    ],
)
def test_what_is_no_trace_gets_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    if content:
        file.write_text(content)
    with pytest.raises(UsageError, match=message) as error:
        read_trace(file)
    assert "\n" not in str(error.value)


def test_traces_of_gpus_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    events = [event("profile", 0, 9, "user_annotation"), event("gemm", 1, 2, "kernel")]
    file.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(UsageError, match="is of GPUs"):
        read_trace(file)


def in_turn_options(**given: Any) -> Options:
    return Options(**{**vars(options(steps=2, batch=8)), **given})


def timed(rt: Runtime, o: Options) -> bool:
    return hybrid_in_turn.main(rt, o)


def test_cases_are_timed_in_turn_and_keep_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    o = in_turn_options(
        vary=("tp=1", "tp=1 zero=1 sequence-parallel=no"), dp=None, tp=2, json=tmp_path / "json"
    )
    assert spawn(timed, 2, o) == [True, True]
    records = [json.loads(line) for line in o.json.read_text().splitlines()] if o.json else []
    assert [record["options"] for record in records] == [AS_GIVEN, *o.vary]
    assert all(len(record["step_seconds"]) == 2 for record in records)
    assert [path.name for path in tmp_path.iterdir()] == ["json"]
    with pytest.raises(UsageError, match="--checkpoints"):
        parse(Options, None, ["--checkpoints", str(tmp_path)])


def test_a_case_has_its_options_over_the_given_ones() -> None:
    o = in_turn_options(tp=2, zero=0, vary=("tp=1 zero=1", "checkpointing=yes overlap=no"))
    first, second, third = o.cases().values()
    assert (first.tp, first.zero, first.model) == (2, 0, o.model)
    assert (second.tp, second.zero, second.checkpointing) == (1, 1, False)
    assert (third.tp, third.checkpointing, third.overlap) == (2, True, False)


@pytest.mark.parametrize("text", ["nonsense", "=2", "tpp=2", "tp=x", "zero=9", "checkpointing=maybe"])
def test_a_bad_case_gets_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=f"--vary '{text}': ") as error:
        in_turn_options(vary=(text,)).cases()
    assert "\n" not in str(error.value)


def test_a_traced_step_of_a_run_shows_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(ALONE, options(steps=3, trace=tmp_path)).run()
    said = capsys.readouterr().out
    assert f"step 3 is traced: {tmp_path / 'step-3' / 'trace.json'}" in said
    assert "compute + exposed communication + idle = total" in said
    assert times_of(read_trace(tmp_path / "step-3" / "trace.json"))[0].calls["aten::mm"] > 0
