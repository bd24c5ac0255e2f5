"""Run a function on N local ranks, from a Python that has already imported torch.

    results = spawn(work, 4, "an argument")      # work(rt, "an argument") on ranks 0..3

Importing torch takes about 2 s per process, forking a process that has imported it 30 ms. A process with one thread
forks its ranks itself. A process with more must not fork: a server without threads imports torch once and forks
each rank.
"""

from __future__ import annotations

import fcntl
import importlib
import linecache
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import cloudpickle
import torch.distributed as dist

from common.errors import RankError
from common.launch import debugger
from common.launch.launcher import Launch
from common.launch.program import leave_at_once
from common.launch.runtime import session
from common.launch.watchdog import RankFailed, describe, exit_code

START = ""  # "fork" or "forkserver"; empty: as `_start` finds
TIMEOUT = 60.0  # seconds that a wait may last unless the caller says otherwise
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
# imported once, before the first spawn; optimizers import torch._dynamo
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "common.launch.runtime",
    "common.models.transformer",
]
END_WITHIN = 8.0  # seconds from the first failure until the last rank is ended by force
MARK = "ranks-of-5d-parallel"  # file in a temporary folder that is ours
LONGEST_PATH = 70  # bytes of the folder for temporary files; a socket's whole path has at most 107
_marks: dict[Path, TextIO] = {}  # open, hence locked, until this process ends

Ranks = dict[Connection, tuple[int, BaseProcess]]


def _rank(
    launch: Launch,
    meeting: str,
    device: str,
    backend: str,
    timeout: float,
    pipe: Connection,
    environment: dict[str, str],
    task: bytes,
    debugged: tuple[int | None, Connection | None],
    inherited: list[Connection],
) -> None:
    """Run one rank's process: join, work, send the result.

    debugged: a rank, and standard input for it. inherited: the parent's ends of pipes, which a fork holds, too.
    """
    for end in inherited:
        end.close()
    os.environ.clear()
    os.environ.update(environment)
    debugger.rank, commands = debugged
    if commands:
        debugger.connect(commands)

    def leave_with_the_parent() -> None:
        with suppress(OSError):  # the pipe's other end closes when the parent is gone; it never writes
            pipe.poll(None)
        os._exit(1)

    if (
        pipe.poll()
    ):  # gone already, with the folder of the store: FileStore would wait for it, and hold the GIL
        os._exit(1)
    threading.Thread(target=leave_with_the_parent, daemon=True).start()

    def tell(report: str) -> None:
        pipe.send((False, report))

    try:
        store = dist.FileStore(meeting, -1)
        with session(launch, store, device, backend, timeout, show=tell) as rt:
            fn, args = pickle.loads(task)
            result = pickle.dumps(fn(rt, *args))
        pipe.send((True, result))
    except RankFailed as failure:
        leave_at_once(failure.code)
    except BaseException as error:
        tell(describe(error, launch.rank))
        leave_at_once(exit_code(error))


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 0.0,
    limit: float | None = 0.0,
    device: str = "cpu",
    backend: str = "gloo",
    debug: int | None = None,
    reader: int | None = None,
) -> list[Any]:
    """Return the results of `fn(rt, *args)` on ranks 0 .. world_size-1 of this machine, in rank order.

    fn must be importable by name (a function of a module), its arguments and results picklable. A notebook is in no
    file, so functions and classes of its cells are sent as code, with the globals that they read.
    timeout: seconds, the longest any wait inside may last; `TIMEOUT` when left out. limit: seconds for the whole
    call; `timeout` when left out, None for no limit.
    debug: the rank whose debugger reads this process's standard input. reader: the rank that reads it otherwise.
    Raises RankError: with the first failing rank's traceback; naming a rank that a signal ended; or, after
    the timeout, naming each rank that has not returned and where it stands. ValueError when ranks could not
    import the script, because it is in no file.
    """
    script = getattr(sys.modules["__main__"], "__file__", "")  # a notebook has none
    if script and not os.path.exists(script):
        raise ValueError("spawn's ranks import the script again: put it in a file")
    timeout = timeout or TIMEOUT
    folder = tempfile.mkdtemp(prefix="spawn-", dir=_folder())
    meeting = os.path.join(folder, "store")
    start = START or _start()
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    else:
        for name in PRELOAD:
            importlib.import_module(name)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    if script:
        task = pickle.dumps((fn, args))
    else:
        cells = {
            name: lines for name, lines in linecache.cache.items() if lines[1:2] == (None,)
        }  # in no file
        task = cloudpickle.dumps((partial(_of_a_cell, cells, fn), args))
    ranks: Ranks = {}
    try:
        for rank in range(world_size):
            here, there = context.Pipe()
            launch = Launch("spawn", rank, world_size, rank, world_size)
            reads = rank == (reader if debug is None else debug) and not debugger.input_is_closed()
            commands = debugger.standard_input() if reads else None
            debugged = debug, commands
            inherited = [*ranks, here] if start == "fork" else []
            given = (launch, meeting, device, backend, timeout, there, environment, task, debugged, inherited)
            process: BaseProcess = context.Process(target=_rank, args=given, daemon=True)  # type: ignore[attr-defined]
            process.start()
            there.close()
            if commands:
                commands.close()
            ranks[here] = (rank, process)
        limit = timeout if limit == 0.0 else limit or math.inf
        return _collect(ranks, dist.FileStore(meeting, -1), limit, debug)
    finally:
        for _, process in ranks.values():
            process.kill()
            process.join()
        shutil.rmtree(folder)


def _start() -> str:
    """Return "fork" if this process can fork its ranks: one thread, and no GPU driver that forks would lose."""
    try:
        threads, libraries = os.listdir("/proc/self/task"), Path("/proc/self/maps").read_text()
    except OSError:  # not Linux
        return "forkserver"
    alone = len(threads) == 1 and "libcuda." not in libraries and "libamdhip" not in libraries
    return "fork" if alone else "forkserver"


def _of_a_cell(cells: dict[str, Any], fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a notebook; tracebacks show the lines of its cells."""
    linecache.cache.update(cells)
    return fn(*args)


def _folder() -> Path:
    """Return this process's temporary folder of multiprocessing; remove those of killed parents of ranks.

    A file marks a folder as ours. Its owner holds a lock on it, which the system releases when the owner dies.
    """
    folder, kept = Path(), tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_PATH:
        tempfile.tempdir = "/tmp"
    try:
        folder = Path(util.get_temp_dir())  # removed when this process ends in good order
    finally:
        tempfile.tempdir = kept
    if folder not in _marks:
        with suppress(OSError):  # a file system without locks: nothing is marked, nothing is removed
            _marks[folder] = (folder / "new").open("w")
            fcntl.flock(_marks[folder], fcntl.LOCK_EX)
            (folder / "new").rename(folder / MARK)  # other processes see it only once it is locked
            for mark in folder.parent.glob(f"pymp-*/{MARK}"):
                with suppress(OSError), mark.open() as file:  # BlockingIOError where its owner lives
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(mark.parent)
    return folder


def _collect(ranks: Ranks, store: dist.Store, limit: float, debug: int | None) -> list[Any]:
    """Return each rank's result, or raise RankError as `spawn` describes."""
    results: dict[int, Any] = {}
    report, code = "", 1
    open_pipes, end = dict(ranks), time.monotonic() + limit
    while open_pipes and time.monotonic() < end:
        for pipe in wait(list(open_pipes), min(3600.0, max(0.0, end - time.monotonic()))):
            assert isinstance(pipe, Connection)
            rank, process = open_pipes[pipe]
            try:
                good, payload = pipe.recv()
            except EOFError:
                del open_pipes[pipe]
                process.join(END_WITHIN)
                if (process.exitcode or 0) < 0 and not report:
                    report = f"rank {rank} was ended by {signal.Signals(-(process.exitcode or 0)).name}"
                    store.set("failure", report)
                if rank not in results:
                    report = report or f"rank {rank} ended with exit code {process.exitcode} and no result"
            else:
                if good:
                    results[rank] = pickle.loads(payload)
                else:
                    report, code = report or payload, 2 if payload.startswith("error: ") else 1
        if report and debug not in {rank for rank, _ in open_pipes.values()}:
            end = min(end, time.monotonic() + END_WITHIN)
    late = [rank for rank, _ in open_pipes.values() if rank not in results]
    if late and not report:
        report = _timed_out(late, store, limit)
    if report or len(results) < len(ranks):
        raise RankError(report or "a rank ended without a result", code)
    return [results[rank] for rank in range(len(ranks))]


def _timed_out(late: list[int], store: dist.Store, limit: float) -> str:
    store.set("failure", "timeout")
    lines = [f"ranks {late} did not return within {limit:g} s:"]
    for rank in late:
        try:
            store.wait([f"where/{rank}"], timedelta(seconds=2))
            lines.append(f"  rank {rank} stands {store.get(f'where/{rank}').decode()}")
        except RuntimeError:
            lines.append(f"  rank {rank} does not answer: it hangs outside Python")
    return "\n".join(lines)
