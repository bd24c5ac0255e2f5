"""Start and end of a program: bad input, or an output that cannot be written, is one line and exit code 2."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from common.errors import RankError, UsageError

WATCHDOG = "watchdog"  # name of the thread that polls the store


class Output(io.FileIO):
    """Standard output. A write raises UsageError if the pipe is closed or the disk is full."""

    def write(self, data: object) -> int:
        """Write to the file; after a failure to /dev/null, so that the interpreter's last flush succeeds."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise _unwritable(self.fileno(), error) from None


def _unwritable(output: int, error: OSError) -> UsageError:
    """Return the error to raise for a failed write; redirect the file descriptor `output` to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
    return UsageError(f"the output cannot be written: {error.strerror}")


def check_output() -> None:
    """Make failing writes to standard output raise UsageError."""
    out = sys.stdout
    if out is None:  # closed from the beginning
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif out is sys.__stdout__ and isinstance(out, io.TextIOWrapper):  # not captured, and not done already
        try:
            out.flush()  # before anything that the new buffer will hold
        except OSError as error:
            raise _unwritable(out.fileno(), error) from None
        file = io.BufferedWriter(Output(out.fileno(), "w", closefd=False))
        lines = out.line_buffering or out.write_through
        sys.stdout = io.TextIOWrapper(file, out.encoding, out.errors, line_buffering=lines)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Exit with the code of `main`. Bad input and failed ranks are shown on stderr, without a traceback.

    Ctrl-C is shown by the terminal, and by the exit code 130.
    """
    try:
        try:
            check_output()
            code = main()
        finally:
            sys.stdout.flush()
    except UsageError as error:
        show_on_stderr(f"error: {error}")
        code = 2
    except RankError as error:
        show_on_stderr(str(error))
        code = error.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    leave(code)


def show_on_stderr(report: str) -> None:
    """Show a failure; under torchrun also pass it to the launcher, which prints it last."""
    with suppress(OSError):  # stderr may be closed; the exit code still reports the failure
        print(report, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        last = report.splitlines()[-1] if "\nTraceback (" in report else report
        message = {"message": last, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))


def leave_at_once(code: int) -> NoReturn:
    """Exit without exit handlers and thread joins: MPI_Finalize and others wait for ranks that have ended."""
    with suppress(OSError, UsageError):
        sys.stdout.flush()
    os._exit(code)


def leave(code: int) -> NoReturn:
    """Exit like sys.exit, or at once while a watchdog is inside its store.

    An interpreter that ends stops that thread by unwinding it through the store's C++, which aborts the process.
    """
    if any(thread.name == WATCHDOG for thread in threading.enumerate()):
        leave_at_once(code)
    sys.exit(code)
