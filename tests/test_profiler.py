"""The profiler assigns time to the right class, joins the ranks' traces and leaves the script unchanged."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi.launch import python, torchrun
from torch.distributed.distributed_c10d import _get_default_store

from common import comm
from common.errors import RankError, UsageError
from common.launch import spawn as spawning
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson import runner as lesson
from common.utils import profiler, timeline
from common.utils.profiler import Report, profile
from common.utils.timeline import Event

PROFILER = Path(profiler.__file__)
LATE = 0.3  # seconds that a rank sleeps


def sleeping(rt: Runtime) -> None:
    time.sleep(LATE)


def multiplying(rt: Runtime) -> None:
    x = torch.ones(400, 400)
    end = time.monotonic() + LATE
    while time.monotonic() < end:
        x @ x


def rank_1_is_late(rt: Runtime, phase: str) -> None:
    """Let rank 1 sleep after all others have arrived."""
    store = _get_default_store()
    if rt.rank != 1:
        store.set(f"{phase}/{rt.rank}", "")
    else:
        store.wait([f"{phase}/{rank}" for rank in range(rt.world_size) if rank != 1])
        time.sleep(LATE)


def waiting(rt: Runtime) -> None:
    rank_1_is_late(rt, "waiting")
    comm.all_reduce(torch.ones(1000), rt.world)


def overlapping(rt: Runtime) -> None:
    rank_1_is_late(rt, "overlapping")
    pending = comm.all_reduce(torch.ones(1000), rt.world, async_op=True)
    x = torch.ones(400, 400)
    while not all(work.is_completed() for work in pending.works or ()):
        x @ x
    pending.wait()


def phases(rt: Runtime) -> dict[str, Report]:
    torch.ones(400, 400) @ torch.ones(400, 400)
    comm.all_reduce(torch.ones(1000), rt.world)
    reports = {}
    with profile(rt):  # the first start of Kineto takes some ranks longer than others
        comm.barrier(rt.world)
    for phase in (sleeping, multiplying, waiting, overlapping):
        comm.barrier(rt.world)
        with profile(rt) as reports[phase.__name__]:
            phase(rt)
    return reports


def test_phases_fall_into_their_classes() -> None:
    first, second = spawn(phases, 2)
    assert first == second  # every rank knows every rank's shares
    for report in first.values():
        assert list(report.ranks) == [0, 1]
        for s in report.ranks.values():
            assert s.compute + s.exposed + s.idle == pytest.approx(s.total)
            assert 0 <= s.hidden <= s.compute
            assert s.resident > 50e6
    # Other processes may take the cores meanwhile: what must be long is compared with what the phase makes it last,
    # and what must be short with what is long.
    most = 0.6 * LATE
    for s in first["sleeping"].ranks.values():
        assert s.idle > most
        assert s.compute + s.exposed < 0.1 * s.idle
    for s in first["multiplying"].ranks.values():
        assert s.compute > most
        assert s.exposed == 0
    on_time, late = first["waiting"].ranks.values()
    assert on_time.exposed > most
    assert on_time.hidden < 0.1 * on_time.exposed
    assert late.idle > most
    busy = first["overlapping"].ranks[0]
    assert busy.hidden > most
    assert busy.exposed < busy.hidden


def traced(rt: Runtime, folder: Path) -> None:
    with profile(rt.world, folder):
        comm.barrier(rt.world)  # the first start of Kineto takes some ranks longer than others
        waiting(rt)


def all_reduces(trace: dict[str, Any]) -> dict[int, Event]:
    return {e["pid"]: e for e in trace["traceEvents"] if e["name"] == "gloo:all_reduce"}


def test_one_trace_holds_all_ranks_on_one_clock(tmp_path: Path) -> None:
    spawn(traced, 3, tmp_path / "new" / "folder")
    files = list((tmp_path / "new" / "folder").iterdir())
    assert [f.name for f in files] == ["trace.json"]
    events = json.loads(files[0].read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(" on ")[0] for name in names] == ["rank 0", "rank 1", "rank 2"]
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0
    on_time, late, _ = (all_reduces({"traceEvents": events})[rank] for rank in range(3))
    assert on_time["ts"] + 0.6e6 * LATE < late["ts"] < on_time["ts"] + on_time["dur"]
    shown = [e for e in events if e["name"] == "exposed" and e["pid"] == 0]
    assert max(e["dur"] for e in shown) >= on_time["dur"] * 0.9


def failing(rt: Runtime, folder: Path) -> None:
    with profile(rt, folder):
        raise ArithmeticError("the reason")


def test_a_block_that_raises_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ArithmeticError: the reason"):
        spawn(failing, 2, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--trace .*file.* cannot be written"):
        profiler._prepare(tmp_path / "file" / "below")


def run(*command: str | Path, program: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *command], capture_output=True, text=True, timeout=240)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
os.write(1, f"given {sys.argv[1:]} {__name__} {sys.path[0]}\\n".encode())
dist.init_process_group("gloo")
x = torch.nn.Linear(50, 50)
model = torch.nn.parallel.DistributedDataParallel(x)
model(torch.ones(8, 50)).sum().backward()
dist.destroy_process_group()
"""


def test_a_script_with_its_own_process_group(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    mine = ("--script", tmp_path / "script.py", "--trace", "mine", "-h")
    done = torchrun(2, PROFILER, "--trace", tmp_path / "out", *mine)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"given ['--trace', 'mine', '-h'] __main__ {tmp_path}") == 2
    assert "trace of 2 ranks" in done.stdout
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert set(all_reduces(trace)) == {0, 1}


def in_this_process(monkeypatch: pytest.MonkeyPatch, *command: str | Path) -> object:
    """Run the command line in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["profiler.py", *map(str, command)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(spawning, "spawn", spawn)
    with pytest.raises(SystemExit) as end:
        profiler.main()
    return end.value.code


@pytest.mark.parametrize("code", ["7", "0", "'a reason'"])
def test_the_exit_code_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (tmp_path / "script.py").write_text(f"import sys, torch\ntorch.ones(3) + 1\nsys.exit({code})\n")
    given = ("--trace", tmp_path / "out", "--script", tmp_path / "script.py")
    assert in_this_process(monkeypatch, *given) == ast.literal_eval(code)
    assert (tmp_path / "out" / "trace.json").exists()


def test_an_exception_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\ntorch.ones(3) + 1\n1 / 0\n")
    given = ("--trace", tmp_path / "out", "--script", tmp_path / "script.py")
    done = run(PROFILER, *given, program=python())
    assert done.returncode == 1
    assert f'{tmp_path / "script.py"}", line 3' in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert not list((tmp_path / "out").iterdir())


def test_a_script_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_this_process(monkeypatch, "--script", tmp_path / "missing.py") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --script ")
    assert err.count("\n") == 1


LESSON = '''
"""A lesson."""
import torch
from common import comm
from common.lesson.runner import LessonOptions, run
def main(rt, options):
    comm.all_reduce(torch.ones(10), rt.world)
    return options.steps == 3
if __name__ == "__main__":
    run(main, LessonOptions)
'''


def test_the_ranks_that_a_script_spawns(tmp_path: Path) -> None:
    (tmp_path / "lesson.py").write_text(LESSON)
    done = run(PROFILER, "--trace", tmp_path / "out", "--script", tmp_path / "lesson.py", "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trace of 2 ranks") == 1
    assert set(all_reduces(json.loads((tmp_path / "out" / "trace.json").read_text()))) == {0, 1}


def lesson_main(rt: Runtime, options: lesson.LessonOptions) -> bool:
    waiting(rt)
    return options.steps == 4


def test_a_lesson_traces_itself(tmp_path: Path) -> None:
    options = lesson.LessonOptions(nproc=2, steps=4, trace=tmp_path)
    assert lesson._start(lesson_main, options)
    assert set(all_reduces(json.loads((tmp_path / "trace.json").read_text()))) == {0, 1}


def test_a_part_of_an_earlier_run_is_not_merged(tmp_path: Path) -> None:
    for rank in (0, 1):
        timeline.part(tmp_path, rank).write_text("{}")
    now = time.time() + 1
    os.utime(timeline.part(tmp_path, 0), (now, now))
    assert profiler._wait(tmp_path, 2, now - 0.5, timeout=0) == [0]
