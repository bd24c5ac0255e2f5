"""Helpers of tests: run commands and workers under mpirun, a worker's checks on gloo, and refusals."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import run as distributed_run

from common.comm import Group
from common.errors import UsageError
from common.launch import forked
from common.launch.runtime import Runtime
from common.launch.spawn import PRELOAD, spawn
from common.lesson import runner as lesson

ROOT = Path(__file__).resolve().parents[2]
BINARIES = ROOT / "build" / "bin"


NOT_STARTED = "The PMIx server's listener thread failed to start"


def need_module(name: str) -> None:
    """Fail the test if the C++ module is not built: tests build nothing."""
    if importlib.util.find_spec(name) is None:
        pytest.fail(f"the Python module {name} is not built: run make setup", pytrace=False)


def cannot(why: str) -> NoReturn:
    """Skip the test, or fail it if FIVED_NO_SKIPS is set, as where every change is checked."""
    (pytest.fail if os.environ.get("FIVED_NO_SKIPS") else pytest.skip)(why)


def need_binary(name: str) -> Path:
    if not (BINARIES / name).exists():
        pytest.fail(f"build/bin/{name} is not built: run make setup", pytrace=False)
    return BINARIES / name


def run(
    command: list[str], timeout: float = 240, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return exit code, stdout and stderr. On a timeout, kill the whole process group and fail the test."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
    process = subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, start_new_session=True, env=variables
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, out, err)
    os.killpg(process.pid, signal.SIGTERM)  # mpirun, told to end, ends its ranks
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    pytest.fail(f"no end within {timeout} s: {' '.join(command)[:200]}", pytrace=False)


def mpirun(
    ranks: int,
    *command: str | Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 240,
    before: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run `command` with the mpirun beside this Python, else the PATH's. before: words that start mpirun."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        pytest.fail("there is no mpirun: run make setup", pytrace=False)
    whole = [*before, launcher, "-np", str(ranks), *map(str, command)]
    done = run(whole, timeout, environment)
    # Open MPI's launcher sometimes fails before it starts any rank; then the command runs once more.
    return run(whole, timeout, environment) if NOT_STARTED in done.stdout + done.stderr else done


@functools.cache
def python() -> Path:
    """Return a Python that forks scripts from a process with torch imported: it saves seconds per rank."""
    if not forked.possible():
        return Path(sys.executable)
    server = forked.interpreter(PRELOAD, os.environ)
    atexit.register(server.__exit__, None, None, None)
    return server.__enter__() / "python"


def torchrun(ranks: int, *words: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a script with torchrun; its agent and its ranks are forks as those of `python`."""
    agent = [str(python()), distributed_run.__file__, "--standalone", f"--nproc_per_node={ranks}"]
    return run([*agent, *map(str, words)], timeout, {"PYTHON_EXEC": str(python())})


def run_worker(
    ranks: int,
    worker: str,
    folder: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    timeout: float = 240,
    before: Sequence[str] = (),
) -> Any:
    """Run tests/mpi/<worker> on `ranks` ranks; return the JSON that rank 0 writes to the file given first.

    before: words that start mpirun, for example on another network. Ranks are then no forks: forks would run
    on their server's network.
    """
    result, scripts = folder / "result.json", ROOT / "tests" / "mpi"
    interpreter = sys.executable if before else python()
    command = (interpreter, scripts / "all_end.py", scripts / worker, result, *arguments)
    done = mpirun(ranks, *command, environment=environment, timeout=timeout, before=before)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


LIBTORCH = ("sp_libtorch", "tp_libtorch", "ep_libtorch", "pp_libtorch")


def on_mpi(worker: str, factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Run tests/mpi/<worker>_worker.py on 1 to 4 ranks of one mpirun; return {size: each rank's outcomes}.

    If xdist runs files in several processes, the first one runs all of LIBTORCH; the others wait and read.
    """
    need_module(worker)
    several = "PYTEST_XDIST_WORKER" in os.environ
    folder = factory.getbasetemp().parent if several else factory.mktemp(worker)
    with (folder / "libtorch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = folder / "libtorch.json"
        if not kept.exists():
            found = run_worker(
                4, "libtorch_worker.py", factory.mktemp("all"), *(LIBTORCH if several else [worker])
            )
            kept.write_text(json.dumps(found))
    of_worker = json.loads(kept.read_text())[worker]
    assert [len(ranks) for ranks in of_worker.values()] == [1, 2, 3, 4]
    return {int(size): ranks for size, ranks in of_worker.items()}


def _outcomes(rt: Runtime, worker: str) -> dict[str, Any]:
    outcomes: dict[str, Any] = importlib.import_module(f"mpi.{worker}_worker").outcomes(rt.world.pg)
    return outcomes


def on_gloo(worker: str, ranks: int) -> list[dict[str, Any]]:
    """Run the same checks on spawned ranks, on gloo."""
    need_module(worker)
    return spawn(_outcomes, ranks, worker)


def refused_by(name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the one line with which a binary refuses its arguments, without its name."""
    done = run([str(need_binary(name)), *arguments], environment=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"{name}: ")
    assert done.stderr.endswith("\n")
    return done.stderr[len(f"{name}: ") : -1]


def ended(main: Callable[..., bool], options: type[Any], *arguments: str) -> int:
    """Run a lesson in this process, which has imported torch already; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lesson.py", *arguments])
        with pytest.raises(SystemExit) as end:
            lesson.run(main, options)
    assert isinstance(end.value.code, int)
    return end.value.code


def refusal(
    main: Callable[..., bool], options: type[Any], capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    """Return the one line with which a lesson refuses its command line."""
    assert ended(main, options, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def refused(main: Callable[[Runtime, Any], Any], ranks: int, options: Any) -> str:
    """Return rank 0's error for bad options. No other rank exists: it must be raised before any message."""
    world = Group("world", 0, ranks, tuple(range(ranks)))
    with pytest.raises(UsageError) as error:
        main(Runtime(0, ranks, 0, ranks, "none", torch.device("cpu"), "gloo", 60.0, world), options)
    assert "\n" not in str(error.value)
    return str(error.value)
