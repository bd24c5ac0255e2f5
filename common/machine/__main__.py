"""Command line of the kit: `python -m common.machine TOOL`; see the package's docstring."""

from __future__ import annotations

import importlib
import sys

import common.machine
from common.errors import UsageError
from common.launch.program import run_program

TOOLS = ("check", "communication", "training", "throughput", "stress", "monitor", "report")


def main() -> int:
    """Start the tool that the first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(common.machine.__doc__)
        return 0
    if name not in TOOLS:
        raise UsageError(f"tool {name!r} is unknown; choose one of {', '.join(TOOLS)}")
    del sys.argv[1]
    importlib.import_module(f"common.machine.{name}").start()
    return 0


if __name__ == "__main__":
    run_program(main)
