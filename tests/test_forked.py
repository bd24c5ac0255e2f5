"""The benchmark's `python`: a script runs in a fork as the real Python would run it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mpi.launch import mpirun

from common.benchmarks import runner
from common.launch import forked

SHOWS = """
import json, os, sys
with open(f"/proc/{os.getppid()}/environ") as file:
    given = "OF_THE_SERVER=1" in file.read()
print(json.dumps([given, __name__, __file__, sys.argv[1:], os.getcwd(), os.environ["SAID"],
                  sorted(os.sched_getaffinity(0)), sys.path[0], sys.stdin.read(), os.getppid(),
                  sorted(os.listdir("/proc/self/fd"))]))
"""
ENDS = {"sys.exit(7)": 7, "print('done')": 0, "1 / 0": 1, "os.kill(os.getpid(), 9)": -9, "os._exit(3)": 3}


pytestmark = pytest.mark.skipif(not forked.possible(), reason="no pidfd_open")


@pytest.fixture(scope="module")
def python() -> Iterator[dict[str, Any]]:
    env = {**os.environ, "OF_THE_SERVER": "1", "PYTHONWARNINGS": "default::ResourceWarning"}
    with forked.interpreter(["multiprocessing"], env) as folder:
        yield {"env": runner.environment(folder), "text": True, "capture_output": True, "timeout": 60}


def test_a_script_sees_what_the_real_python_shows_it(python: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    (tmp_path / "below").mkdir()
    given = {**python, "cwd": tmp_path / "below", "input": "words"}
    given["env"] = {**python["env"], "SAID": "it"}
    core = str(min(os.sched_getaffinity(0)))
    script = ["../shows.py", "--an", "option"]
    outcomes = [
        json.loads(subprocess.run(["taskset", "-c", core, program, *script], **given).stdout)
        for program in ("python", sys.executable)
    ]
    (*ours, parent, files), (*theirs, real_parent, _) = outcomes
    assert ours == [True, *theirs[1:]]
    assert parent != real_parent  # it was a fork
    assert len(files) == 4  # the fourth is the listing itself


SPAWNS = """
import multiprocessing
class Result:
    pass
def work(_):
    return Result()
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    with context.Pool(1) as pool:
        print(type(pool.map(work, [0])[0]).__name__)
"""


def test_a_script_starts_processes_that_know_its_classes(python: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = subprocess.run(["python", "spawns.py"], **python, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("Result\n", "")


@pytest.mark.parametrize(("ends", "code"), ENDS.items())
def test_its_end_is_the_program_s(python: dict[str, Any], tmp_path: Path, ends: str, code: int) -> None:
    (tmp_path / "ends.py").write_text(f"import os, sys\n{ends}\n")
    done = subprocess.run(["python", "-u", tmp_path / "ends.py"], **python)
    assert done.returncode == code
    assert ("ZeroDivisionError" in done.stderr) == (ends == "1 / 0")


LATE = """
import atexit, sys, threading, time
atexit.register(print, "last", end="")
threading.Thread(target=lambda: (time.sleep(0.2), print("then a thread"))).start()
sys.exit("first")
"""


def test_threads_and_exit_handlers_come_after_its_end(python: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    for program in ("python", sys.executable):
        done = subprocess.run([program, tmp_path / "late.py"], **python)
        assert (done.returncode, done.stdout, done.stderr) == (1, "then a thread\nlast", "first\n")


def test_a_full_disk_is_told_as_python_tells_it(python: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text("print('done', end='')")
    buffered = {name: value for name, value in python["env"].items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        codes = [
            subprocess.run(
                [program, tmp_path / "full.py"], env=buffered, stdout=full, stderr=subprocess.DEVNULL
            ).returncode
            for program in ("python", sys.executable)
        ]
    assert codes == [120, 120]


RAISES = """
from mpi4py.run import main
main()
"""
ONE_WAITS = """
from mpi4py import MPI
1 // MPI.COMM_WORLD.rank  # rank 0 raises
MPI.COMM_WORLD.recv(source=0)
"""


def test_a_rank_that_raises_ends_the_others(python: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    (tmp_path / "one_waits.py").write_text(ONE_WAITS)
    done = mpirun(2, "python", tmp_path / "raises.py", tmp_path / "one_waits.py", environment=python["env"])
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


WAITS = "import subprocess\nwith subprocess.Popen(['sleep', '600']) as p:\n    print(p.pid, flush=True)\n"


def waiting(env: dict[str, str], script: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """Start a script that waits for a child process; return both processes."""
    script.write_text(WAITS)
    started = subprocess.Popen(["python", script], env=env, stdout=-1, stderr=-1, text=True)
    assert started.stdout
    return started, psutil.Process(int(started.stdout.readline()))


def assert_ended(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        for _ in range(1000):
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.01)
        pytest.fail(f"{process} is running")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_who_ends_the_program_ends_the_script_and_what_it_started(
    python: dict[str, Any], tmp_path: Path, how: signal.Signals
) -> None:
    started, sleeps = waiting(python["env"], tmp_path / "waits.py")
    started.send_signal(how)
    assert started.communicate(timeout=240) == ("", "")
    assert started.returncode == -how
    assert_ended(sleeps)


def test_the_end_of_the_server_ends_the_scripts(tmp_path: Path) -> None:
    with forked.interpreter([], os.environ) as folder:
        started, sleeps = waiting(runner.environment(folder), tmp_path / "waits.py")
    assert started.communicate(timeout=240) == ("", "")
    assert started.returncode == 1
    assert_ended(sleeps)


def test_a_fork_has_nothing_of_other_scripts(python: dict[str, Any], tmp_path: Path) -> None:
    started, _ = waiting(python["env"], tmp_path / "waits.py")
    shows = "import os\nprint(len(os.listdir('/proc/self/fd')))"
    (tmp_path / "shows.py").write_text(shows)
    done = subprocess.run(["python", tmp_path / "shows.py"], **python)
    assert (done.stdout, done.stderr) == ("4\n", "")
    started.kill()
    started.communicate()


def test_it_needs_a_python_and_a_system_with_pidfd_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not forked.possible()
    monkeypatch.delattr(os, "pidfd_open")
    assert not forked.possible()


def test_where_a_socket_s_path_would_be_too_long_the_real_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (tmp_path / "shows.py").write_text("import os; print(os.getppid())")
    with forked.interpreter([], os.environ) as programs:
        done = subprocess.run([programs / "python", tmp_path / "shows.py"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{os.getpid()}\n", "")
    assert capfd.readouterr().err == ""  # no server failed


def test_what_is_no_script_and_what_comes_late_is_the_real_python_s(
    python: dict[str, Any], tmp_path: Path
) -> None:
    shows = "import os; print(os.getppid())"
    mine = subprocess.run(["python", "-c", shows], **python).stdout
    assert mine == f"{os.getpid()}\n"
    with forked.interpreter([], os.environ) as folder:
        late = folder / "python"
        text = late.read_text()
    (tmp_path / "late.sh").write_text(text)
    (tmp_path / "shows.py").write_text(shows)
    done = subprocess.run(["sh", tmp_path / "late.sh", tmp_path / "shows.py"], **python)
    assert (done.stdout, done.returncode) == (mine, 0)
