"""Start lessons one after the other, each as `python lesson.py options` would: torch is imported once.

python lessons_worker.py RESULT COMMANDS, under mpirun; rank 0 writes the exit codes and outputs as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys

from mpi.worker import write


def started(command: list[str]) -> tuple[object, str]:
    mine, sys.argv, printed = sys.argv, command, io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return end.code, printed.getvalue()
    finally:
        sys.argv = mine
    raise AssertionError(f"{command[0]} did not exit")


if __name__ == "__main__":
    write([started(command) for command in json.loads(sys.argv[2])])
