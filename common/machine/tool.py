"""What the tools with ranks share: options, how many ranks they start by themselves, and their output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from rich.markup import escape
from rich.table import Table

from common.launch.command_line import parse
from common.launch.launcher import resolve
from common.launch.runtime import Runtime
from common.lesson.runner import LessonOptions, console, run, write_records
from common.machine.verdict import Line, as_json, as_text, failed, headline, table, write_log

HIDDEN = ("steps", "seed", "dtype", "data", "trace", "plot", "debug", "check")


@dataclass
class ToolOptions(LessonOptions, without=HIDDEN):
    """Options of all tools with ranks."""

    log: Path | None = None
    """File to which the lines are appended as text."""


T = TypeVar("T", bound=ToolOptions)


def say(rt: Runtime, text: str) -> None:
    """Tell a person at a terminal what is being done; programs get the verdict first."""
    if rt.rank == 0 and sys.stderr.isatty():
        print(f"  {text} ...", file=sys.stderr, flush=True)


def ranks_here(device: str = "auto") -> int:
    """Return how many ranks to start on this machine: a rank per GPU, else two to four on its cores."""
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    return gpus or min(4, max(2, os.cpu_count() or 2))


def start_tool(main: Callable[[Runtime, T], bool], options: type[T]) -> NoReturn:
    """Run a tool on its ranks; without a launcher and --nproc it starts them itself."""

    def with_ranks(*args: Any, **kwargs: Any) -> T:
        found: T = parse(*args, **kwargs)
        if found.nproc is None and resolve().launcher == "none":
            found.nproc = ranks_here(found.device)
        write_log(found.log, "")  # fails now if it cannot be written
        return found

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a thread per rank
    torch.set_num_threads(1)
    run(main, options, parse=partial(with_ranks))


def finish(
    rt: Runtime,
    o: ToolOptions,
    tool: str,
    lines: Sequence[Line],
    title: str,
    tables: Iterable[Table] = (),
    **facts: Any,
) -> bool:
    """Print verdict, lines and tables on rank 0, write log and record; return False if a line failed."""
    out = console(rt)
    out.print(escape(headline(lines)))
    out.print(table(lines, title))
    for more in tables:
        out.print(more)
    if rt.rank == 0:
        write_log(o.log, as_text(lines, title))
        record = as_json(tool, lines, title=title, ranks=rt.world_size, backend=rt.backend, **facts)
        write_records(o.json, [record])
    return not failed(lines)
