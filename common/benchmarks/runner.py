"""Runs one task: its records when it went well, and why not when it failed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.benchmarks.cases import Task
from common.benchmarks.measures import read

Record = dict[str, Any]

GRACE = 5.0  # seconds between asking a task to end and ending it


@dataclass(frozen=True)
class Outcome:
    """What a task gave. `error` is empty when all went well."""

    records: list[Record]
    error: str
    seconds: float


def run(task: Task, logs: Path, timeout: float, python: Path | None = None) -> Outcome:
    """Run the task's command with one thread a rank, at most `timeout` seconds; its output goes to `logs`.

    python: a folder with the program `python` to start scripts with; not those that measure memory, because a fork's
    resident set has that of its server in it.
    """
    logs.mkdir(parents=True, exist_ok=True)
    errors = logs / f"{task.name}.stderr"
    env = environment(None if task.case.purpose == "memory" else python)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, (logs / f"{task.name}.stdout").open("w") as out:
        file = Path(folder, "records.jsonl")
        command = [*shlex.split(task.command), "--json", str(file)]
        with errors.open("w") as err:
            code = _call(command, task.folder, env, timeout, out, err)
        records, wrong = read(file)
    if code is None:
        error = f"not done after {timeout:g} s"
    elif code:
        error = last_error(errors.read_text(errors="replace")) or f"exit code {code}"
    else:
        error = f"its {wrong[0]}" if wrong else "" if records else "it wrote no record"
    return Outcome(records, error, time.monotonic() - start)


def environment(python: Path | None = None) -> dict[str, str]:
    """One thread a rank; the program `python` of that folder, then this environment's programs, before all others."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    ours = str(Path(sys.executable).parent)
    others = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder != ours]
    first = {"PATH": os.pathsep.join([*([str(python)] if python else []), ours, *others])}
    torchrun = {"PYTHON_EXEC": str(python / "python")} if python else {}
    return {**os.environ, **threads, **first, **torchrun}


def _call(
    command: list[str], folder: Path, env: dict[str, str], timeout: float, out: Any, err: Any
) -> int | None:
    """The exit code, None when it took too long. Nothing it started is left behind."""
    try:
        process = psutil.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    except OSError as error:
        err.write(f"{command[0]} cannot be started in {folder}: {error.strerror}\n")
        return 127
    try:
        return int(process.wait(timeout))
    except psutil.TimeoutExpired:
        return None
    finally:
        if process.is_running():
            _end(process)


def _end(process: psutil.Process) -> None:
    """Ask the process to end, then end it and all that it started."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=GRACE)
    for one in alive:
        one.kill()
    psutil.wait_procs(alive, timeout=GRACE)


def last_error(text: str) -> str:
    """The last line that the program itself wrote: without what mpirun and torchrun add around a failure."""
    ours = re.sub(r"^-{40,}\n.*?^-{40,}$", "", text, flags=re.MULTILINE | re.DOTALL)  # mpirun's boxes
    ours = re.split(r"^E\d{4} .*torch/distributed/elastic", ours, flags=re.MULTILINE)[0]  # torchrun's report
    for part in (ours, text):
        if lines := [line.strip() for line in part.splitlines() if re.search(r"\w", line)]:
            return lines[-1]
    return ""
