"""Lines of a check: each pass, warn, fail or skipped, with what was found and the cure; and the verdict over them.

exit code 0: nothing failed     1: a line failed     2: bad input
"""

from __future__ import annotations

import platform
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.markup import escape
from rich.table import Table

from common.errors import UsageError
from common.launch.terminal import make_table

Status = Literal["pass", "warn", "fail", "skipped"]
NO_GPU = "this machine has no NVIDIA GPU"
COLOURS = {"pass": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}


@dataclass(frozen=True)
class Line:
    """One check: its name, its status, what was found, and what to do about it."""

    name: str
    status: Status
    found: str
    cure: str = ""
    host: str = ""


def passed(name: str, found: str) -> Line:
    """Return a line that passes."""
    return Line(name, "pass", found)


def skipped(name: str, why: str) -> Line:
    """Return a line that was not checked, with the reason."""
    return Line(name, "skipped", why)


def of(holds: bool, name: str, found: str, cure: str, otherwise: Status = "fail") -> Line:
    """Return a line that passes if it holds, and has status `otherwise` and the cure if not."""
    return Line(name, "pass", found) if holds else Line(name, otherwise, found, cure)


def failed(lines: Iterable[Line]) -> bool:
    """Return True if a line failed."""
    return any(line.status == "fail" for line in lines)


def headline(lines: Sequence[Line]) -> str:
    """Return the verdict in one line: the first failure by name, or else the first warning, or that all passed."""
    counts = {s: sum(line.status == s for line in lines) for s in COLOURS}
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    for status in ("fail", "warn"):
        for line in lines:
            if line.status == status:
                where = f"{line.host}: " if line.host else ""
                return f"{status.upper()}: {where}{line.name}: {line.found} ({shown})"
    if not counts["pass"]:
        return f"SKIPPED: {lines[0].found if lines else 'nothing was checked'} ({shown})"
    without = " without a GPU" if any(line.found == NO_GPU for line in lines) else ""
    return f"PASS{without}: {shown}"


def table(lines: Sequence[Line], title: str) -> Table:
    """Return the lines as a table; the cure stands below what was found."""
    many = any(line.host for line in lines)
    heads = ("", *(("host",) if many else ()), "check", "found")
    made = make_table(title, heads)
    for line in lines:
        found = line.found + (f"\n→ {line.cure}" if line.cure else "")
        colour = COLOURS[line.status]
        host = (line.host,) if many else ()
        made.add_row(f"[{colour}]{line.status}[/]", *map(escape, (*host, line.name, found)))
    return made


def as_text(lines: Sequence[Line], title: str) -> str:
    """Return the lines as a log: the verdict, then one line each."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    rows = [headline(lines), f"{title}, {now}"]
    for line in lines:
        cure = f"; {line.cure}" if line.cure else ""
        host = f"{line.host}: " if line.host else ""
        rows.append(f"{line.status:<8}{host}{line.name}: {line.found}{cure}")
    return "\n".join(rows) + "\n"


def as_json(tool: str, lines: Sequence[Line], **facts: Any) -> dict[str, Any]:
    """Return a record of --json, with the machine that it is of."""
    gpus = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return {
        "tool": tool,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "gpus": ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none",
        "command": " ".join(sys.argv[1:]),
        "verdict": headline(lines),
        "lines": [asdict(x) for x in lines],
        **facts,
    }


def write_log(path: Path | None, text: str) -> None:
    """Append text to a log. Raises UsageError if it cannot be written."""
    if path is None:
        return
    try:
        with path.open("a") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--log {path} cannot be written: {error.strerror}") from None
