"""A program `python` that runs each script in a fork of one process, which has imported what scripts need.

    with interpreter(["torch"], env) as folder:        # holds the program
        subprocess.run(["mpirun", "-np", "2", "python", "file.py"], env={**env, "PATH": f"{folder}:..."})

Importing torch and what lessons import takes 3 s of CPU per rank, a fork 30 ms. The program (fork_client.py) sends its
arguments, working folder, environment, cores and open files to a server without threads, which may therefore fork; the
fork runs the script, and the ranks that `spawn` starts there are forks again. It ends as multiprocessing's forks do,
without the interpreter's own end, which would take apart all that was imported: 1 s of CPU per rank. Requires
`possible()`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn


def possible() -> bool:
    """True if the system and this Python have pidfd_open: Linux since 5.3, but not every build of Python there."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


@contextmanager
def interpreter(preload: Iterable[str], env: Mapping[str, str]) -> Iterator[Path]:
    """Yield the program's folder, usable at once: scripts wait until the server has imported `preload`.

    env: the server's environment. Scripts have their own, but OpenMP reads its number of threads when it is loaded.
    """
    with tempfile.TemporaryDirectory(prefix="python-") as name, socket.socket(socket.AF_UNIX) as listener:
        program, address = Path(name, "python"), str(Path(name, "socket"))
        client = Path(__file__).with_name("fork_client.py")
        words = shlex.join([sys.executable, "-IS", str(client), sys.executable, address])
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)
        try:
            listener.bind(address)
        except OSError:  # a path too long for a socket: without a server the program runs the real Python
            yield program.parent
            return
        listener.listen(64)
        command = [sys.executable, "-m", __name__, str(listener.fileno()), *preload]
        server = subprocess.Popen(
            command,
            pass_fds=[listener.fileno()],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        listener.close()
        with server:
            yield program.parent


def serve(listener: socket.socket) -> None:
    """Fork for each client and tell it the exit code. Once stdin is closed, end all. Returns in each fork."""
    events = select.poll()
    for descriptor in (0, listener.fileno()):
        events.register(descriptor, select.POLLIN)
    running: dict[int, tuple[int, int, socket.socket]] = {}  # of each fork, by both of its descriptors
    while True:
        descriptor, _ = events.poll()[0]
        if descriptor == 0:
            for pid, _, _ in set(running.values()):
                os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        if descriptor == listener.fileno():
            client, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)  # here, too: what the script starts must be in its group, whoever runs first
                for _, process, other in set(running.values()):
                    os.close(process)
                    other.close()
                return _become(client)
            os.setpgid(pid, pid)
            process = os.pidfd_open(pid)
            running[process] = running[client.fileno()] = pid, process, client
            events.register(process, select.POLLIN)
            events.register(client, 0)  # the end of the client alone is an event
            continue
        pid, process, client = running[descriptor]
        if descriptor != process:  # the client has ended: end its script, too
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for descriptor in (process, client.fileno()):
            events.unregister(descriptor)
            del running[descriptor]
        os.close(process)
        with client, suppress(OSError):
            client.sendall(b"%d\n" % code)


def _become(client: socket.socket) -> None:
    """Take over what the client sends, in the fork."""
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    with client, client.makefile() as sent:
        arguments, folder, environment, cores = json.loads(sent.readline())
    for place, descriptor in enumerate(files):
        os.dup2(descriptor, place)
        os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    sys.argv = [os.path.join(folder, arguments[0]), *arguments[1:]]
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))


def run(path: str) -> NoReturn:
    """Run the script and end this process as Python does, but leave its memory to the system."""
    script = ModuleType("__main__")
    script.__file__ = path
    sys.modules["__main__"] = sys.modules["__mp_main__"] = script  # the second name is multiprocessing's
    code = 0
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), script.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # Python's own
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        # mpi4py does the one or the other at the interpreter's own end
        if code and "mpi4py.run" in sys.modules:
            mpi.COMM_WORLD.Abort(code)
        mpi.Finalize()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    with socket.socket(fileno=int(sys.argv[1])) as waiting_clients:
        serve(waiting_clients)
    run(sys.argv[0])
