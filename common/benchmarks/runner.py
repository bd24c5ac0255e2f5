"""Runner of one task: returns its records on success, or the reason of its failure."""

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

GRACE = 5.0  # seconds between asking a task to end and killing it


@dataclass(frozen=True)
class Outcome:
    """Result of a task. `error` is empty on success."""

    records: list[Record]
    error: str
    seconds: float


def run(task: Task, logs: Path, timeout: float, python: Path | None = None) -> Outcome:
    """Run the task's command with one thread per rank, at most `timeout` seconds; its output goes to `logs`.

    python: a folder with the program `python` that starts the scripts; scripts that measure memory do not use
    it, because a fork's resident set includes that of its server.
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
    """Return the environment: one thread per rank; PATH begins with `python`, then this Python's folder."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    ours = str(Path(sys.executable).parent)
    others = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder != ours]
    first = {"PATH": os.pathsep.join([*([str(python)] if python else []), ours, *others])}
    torchrun = {"PYTHON_EXEC": str(python / "python")} if python else {}
    return {**os.environ, **threads, **first, **torchrun}


def _call(
    command: list[str], folder: Path, env: dict[str, str], timeout: float, out: Any, err: Any
) -> int | None:
    """Return the exit code, None after a timeout. No process that the command started is left behind."""
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
    """Ask the process to end, then kill it and its children."""
    family = [process, *process.children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(family, timeout=GRACE)
    for one in alive:
        one.kill()
    psutil.wait_procs(alive, timeout=GRACE)


def last_error(text: str) -> str:
    """Return the last line of the program itself, without the text that mpirun and torchrun add."""
    ours = re.sub(r"^-{40,}\n.*?^-{40,}$", "", text, flags=re.MULTILINE | re.DOTALL)  # mpirun's boxes
    ours = re.split(r"^E\d{4} .*torch/distributed/elastic", ours, flags=re.MULTILINE)[0]  # torchrun's report
    for part in (ours, text):
        if lines := [line.strip() for line in part.splitlines() if re.search(r"\w", line)]:
            return lines[-1]
    return ""
