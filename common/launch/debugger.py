"""Python's debugger on one rank, while the other ranks wait: `python lesson.py --nproc 4 --debug 2`.

It stops at every `breakpoint()` of the lesson and of the modules that the lesson imports; where there is none, at the
first line of the lesson's `main`; and where this rank raises. The other ranks ignore `breakpoint()`. They wait in their
next collective, without a timeout, and after a failure until the debugger is left.

A rank is forked with /dev/null as its standard input, so `spawn` sends it a duplicate of its own: a terminal, or a
pipe with commands. Under a launcher the rank has the standard input that the launcher gives it.
"""

from __future__ import annotations

import ast
import os
import pdb
import sys
import termios
import threading
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from common.errors import RankError, UsageError
from common.launch.launcher import Launch

T = TypeVar("T")

FOREVER = 1e6  # seconds; a longer timeout does not fit gloo's 32 bits of milliseconds
rank: int | None = None  # that is debugged, if any; set on all ranks of the run
at_prompt = threading.Event()  # set while this process waits for a command


class Prompt(pdb.Pdb):
    """Debugger that names its rank, and tells the watchdog when it waits for a command."""

    def __init__(self) -> None:
        super().__init__(nosigint=True)  # Ctrl-C ends all ranks, as without the debugger
        self.prompt = f"(rank {rank}) "

    def interaction(self, *where: Any) -> None:
        """Read and carry out commands until the program goes on."""
        at_prompt.set()
        try:
            super().interaction(*where)
        finally:
            at_prompt.clear()


def check(chosen: int, launch: Launch, ranks: int) -> None:
    """Check that the rank exists, and that commands can reach it if it is this one. Raises UsageError."""
    if chosen >= ranks:
        raise UsageError(f"--debug {chosen}: give a rank from 0 to {ranks - 1}")
    if launch.launcher != "none" and chosen != launch.rank:
        return
    with suppress(OSError):  # closed
        if not os.path.samestat(os.fstat(0), os.stat(os.devnull)):
            return
    if launch.launcher == "none":
        raise UsageError(f"--debug {chosen} reads commands: give a terminal or a pipe as standard input")
    mpirun = f"mpirun --stdin {chosen}, or with " * (launch.launcher == "openmpi")
    raise UsageError(
        f"--debug {chosen}: {launch.launcher} gives rank {chosen} no standard input; "
        f"start with {mpirun}--nproc and no launcher"
    )


def input_is_closed() -> bool:
    """Return True if this process has no standard input."""
    try:
        os.fstat(0)
    except OSError:
        return True
    return False


def standard_input() -> Connection:
    """Return a duplicate of standard input that can be sent to another process."""
    return Connection(os.dup(0), writable=False)


def connect(source: Connection) -> None:
    """Read standard input from the duplicate."""
    os.dup2(source.fileno(), 0)
    source.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115


@contextmanager
def kept_terminal() -> Iterator[None]:
    """Restore the terminal's settings: a rank that is ended at its prompt leaves those of line editing."""
    if not os.isatty(0):
        yield
        return
    kept = termios.tcgetattr(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, kept)


def debugged(main: Callable[[Any, Any], T], rt: Any, options: Any) -> T:
    """Run `main(rt, options)`, on one rank under the debugger. Raises RankError if its user quits."""
    if rt.rank != rank:
        sys.breakpointhook = lambda *_, **__: None
        return main(rt, options)
    debugger = Prompt()
    sys.breakpointhook = lambda *_, **__: debugger.set_trace(sys._getframe(1))
    print(f"rank {rank} of {rt.world_size} in Python's debugger: h lists its commands, q ends all ranks")
    try:
        result = main(rt, options) if has_breakpoints() else debugger.runcall(main, rt, options)
        if result is None:  # what runcall returns after q
            raise BdbQuit
        return result
    except BdbQuit:
        raise RankError(f"rank {rank} was ended in the debugger") from None
    except UsageError:
        raise
    except Exception as error:
        print(f"rank {rank} raised", *traceback.format_exception_only(error), end="")
        debugger.reset()
        debugger.interaction(None, error.__traceback__)
        raise
    finally:
        sys.breakpointhook = sys.__breakpointhook__


def has_breakpoints() -> bool:
    """Return True if a loaded module that belongs to no library calls breakpoint()."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        library = name.partition(".")[0] in sys.stdlib_module_names or "site-packages" in file
        if (
            os.path.isfile(file)
            and file.endswith(".py")
            and not library
            and _calls_breakpoint(Path(file).read_text(encoding="utf-8"))
        ):
            return True
    return False


def _calls_breakpoint(source: str) -> bool:
    if "breakpoint(" not in source:
        return False
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id == "breakpoint" for called in calls)
