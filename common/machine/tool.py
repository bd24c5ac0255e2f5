"""What the tools with ranks share: options, how many ranks they start by themselves, and their output."""

from __future__ import annotations

import os
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
        write_records(o.json, [as_json(tool, lines, ranks=rt.world_size, backend=rt.backend, **facts)])
    return not failed(lines)
