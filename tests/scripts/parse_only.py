"""Parse command lines without running what they start: read JSON [[folder, file, arg, ...], ...], write the errors.

echo '[[".", "lesson.py", "--nproc", "4"]]' | python parse_only.py
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import tyro

from common.errors import UsageError
from common.launch import command_line


class Parsed(BaseException):
    """The options were parsed, or shown by --help; nothing after it may run."""


def only_parse(cli: Any) -> Any:
    """Return tyro.cli, which raises Parsed instead of returning, in a module that goes by its name."""

    class Tyro:
        conf = tyro.conf

        @staticmethod
        def cli(*args: Any, **known: Any) -> None:
            try:
                cli(*args, **known)
            except SystemExit as end:
                if end.code not in (0, None):
                    raise
            raise Parsed

    return Tyro


def error(folder: str, file: str, *args: str) -> str | None:
    """Return the message with which the program refuses its arguments; None if it takes them."""
    os.chdir(folder)
    sys.argv = [file, *args]
    try:
        runpy.run_path(file, run_name="__main__")
    except Parsed:
        return None
    except SystemExit as end:
        return str(REFUSED.pop() if REFUSED else end)
    return "parses no options"


REFUSED: list[UsageError] = []


if __name__ == "__main__":
    commands = json.load(sys.stdin)
    command_line.tyro = only_parse(tyro.cli)  # type: ignore[attr-defined]
    parse = command_line._one_line

    def said(box: str) -> str:
        """Return the reason, and keep it: a program prints it and ends."""
        REFUSED.append(UsageError(parse(box)))
        return str(REFUSED[-1])

    command_line._one_line = said
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
    json.dump([error(*command) for command in commands], out)
    out.flush()
    os._exit(0)  # past the exit handlers of whatever the programs imported
