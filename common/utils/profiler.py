"""Profile of each rank's time: compute, exposed and hidden communication, idle; for all ranks at once.

    with profile(rt, trace=Path("out")) as report:
        step()
    console(rt).print(report.table())            # out/trace.json opens in https://ui.perfetto.dev

    python common/utils/profiler.py --script your_script.py [its arguments]
    torchrun --nproc_per_node=2 common/utils/profiler.py --trace out --script your_script.py [its arguments]

torch.profiler (Kineto) records, `common.utils.timeline` defines the classes. A script runs unchanged, as
`__main__`, with its own arguments and exit code, and may destroy its process group: ranks meet in the trace's folder,
which all hosts must share. Each leaves its part there; rank 0 waits `--timeout` seconds for the others and merges.
A script that raises shows its traceback and leaves no trace. Ranks that a script starts by `common.launch.spawn` are
profiled in place of the process that waits for them.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as kineto

from common import comm
from common.comm import Group
from common.errors import UsageError
from common.launch import spawn
from common.launch.command_line import Checked, Within, check_folder, parse
from common.launch.launcher import resolve
from common.launch.program import run_program
from common.launch.runtime import Runtime
from common.launch.terminal import make_table, terminal
from common.utils import timeline
from common.utils.timeline import Event, Shares

T = TypeVar("T")

# A script's variables live until Python ends, as they do without a profiler: freeing a DDP model earlier can
# hang, because it joins gloo's threads with the interpreter's lock held, and they may want that lock.
_left_behind: list[object] = []


@dataclass
class Report:
    """Each rank's shares, in rank order; filled when the profiled block ends."""

    ranks: dict[int, Shares] = field(default_factory=dict)

    def table(self) -> Table:
        """Return a line per rank: seconds and share of its total by class, peak memory in MB (10^6 bytes)."""
        cuda = any(s.cuda for s in self.ranks.values())
        heads = [">rank", ">total", ">compute", ">exposed", ">hidden", ">idle", ">peak MB"] + [
            ">GPU MB"
        ] * cuda
        table = make_table("seconds by rank: compute + exposed communication + idle = total", heads)
        for rank, s in self.ranks.items():
            classes = (f"{t:.3f} {t / s.total:4.0%}" for t in (s.compute, s.exposed, s.hidden, s.idle))
            memory = (f"{b / 1e6:.0f}" for b in (s.resident, s.cuda)[: 1 + cuda])
            table.add_row(str(rank), f"{s.total:.3f}", *classes, *memory)
        return table


def peak_resident() -> int:
    """Return this process's peak memory in bytes. Not `ru_maxrss`, which starts with the parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak


def _prepare(folder: Path | None) -> None:
    """Check up front that a profile can be made and its folder written. Raises UsageError."""
    if torch._C._autograd._profiler_enabled():
        raise UsageError(
            "a profiler is already running in this process; use one of --script, --trace, profile()"
        )
    if folder is not None:
        check_folder("trace", folder, folder)


@contextmanager
def _recorded() -> Iterator[Callable[[], tuple[Shares, list[Event]]]]:
    """Record this process. The yielded function, called after the block, returns shares and events."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports every start and stop on stderr
    activities = [ProfilerActivity.CPU]
    gpu = torch.cuda.is_available()
    if gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.reset_peak_memory_stats()

    def result() -> tuple[Shares, list[Event]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kineto.json")
            recorder.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        return timeline.read(trace, peak_resident(), torch.cuda.max_memory_allocated() if gpu else 0)

    with kineto(activities=activities) as recorder, record_function(timeline.WINDOW):
        yield result


@contextmanager
def profile(where: Runtime | Group, trace: Path | None = None) -> Iterator[Report]:
    """Profile a block on every rank of a world or a group; all ranks have the complete report after it.

    trace: folder for the merged Chrome trace `trace.json`, one block a folder. After the block the ranks exchange
    seven numbers each (an all-gather, which an open ledger counts). If the block raises, nothing is written.
    Raises UsageError when the folder cannot be written or a profiler is already running.
    """
    group = where.world if isinstance(where, Runtime) else where
    _prepare(trace)
    report = Report()
    with _recorded() as result:
        yield report
    shares, events = result()
    if trace:
        timeline.write_part(trace, group.rank, socket.gethostname(), shares, events)
    numbers = comm.all_gather(torch.tensor([astuple(shares)], dtype=torch.float64), group)
    report.ranks = {rank: Shares(*row) for rank, row in enumerate(numbers.tolist())}
    if trace and group.rank == 0:
        timeline.merge(trace, range(group.size))


def profiled(trace: Path, fn: Callable[..., T], rt: Runtime, *args: Any) -> T:
    """Return fn(rt, *args), run under `profile`; rank 0 prints the table."""
    with profile(rt, trace) as report:
        result = fn(rt, *args)
    if rt.rank == 0:
        _show(report, trace)
    return result


def _show(report: Report, trace: Path) -> None:
    out = terminal()
    out.print(report.table())
    out.print(
        f"trace of {len(report.ranks)} ranks: {trace / 'trace.json'} (open in ui.perfetto.dev)",
        soft_wrap=True,
    )


@dataclass
class Options(Checked):
    """Options: a script to profile on all its ranks."""

    script: Path
    """Python script; all words after it are its own arguments."""
    trace: Path = Path("profile")
    """Folder for trace.json, shared by all hosts."""
    timeout: Annotated[float, Within(1e-3, 1e6)] = 60.0
    """Seconds that rank 0 waits for the other ranks' traces."""


def _run(script: Path, arguments: list[str]) -> object:
    """Run a script as `python script arguments` would; return its exit code, or its argument of sys.exit."""
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        _left_behind.append(runpy.run_path(str(script), run_name="__main__"))
    except SystemExit as end:
        _left_behind.append(end)
        return end.code
    return 0


def _wait(folder: Path, size: int, started: float, timeout: float) -> list[int]:
    """Return the ranks whose parts of this run have come; older files are another run's."""
    end = time.monotonic() + timeout
    while True:
        paths = {rank: timeline.part(folder, rank) for rank in range(size)}
        here = [rank for rank, path in paths.items() if path.exists() and path.stat().st_mtime >= started]
        if len(here) == size or time.monotonic() > end:
            return here
        time.sleep(0.05)


def _profile_script(options: Options, arguments: list[str]) -> object:
    """Run the script and report; return its exit code."""
    launch, started, trace = resolve(), time.time(), options.trace.resolve()  # the script may change folder
    if not options.script.is_file():
        raise UsageError(f"--script {options.script} is not a file; give the path of a Python script")
    _prepare(options.trace)
    plain, spawned = spawn.spawn, []

    def spawn_profiled(fn: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> list[Any]:
        spawned.append(world_size)
        return plain(partial(profiled, trace, fn), world_size, *args, **how)

    spawn.spawn = spawn_profiled
    with _recorded() as result:
        code = _run(options.script, arguments)
    if spawned:
        return code
    timeline.write_part(trace, launch.rank, socket.gethostname(), *result())
    if launch.rank == 0:
        here = _wait(trace, launch.world_size, started, options.timeout)
        _show(Report(timeline.merge(trace, here)), options.trace)
        if missing := sorted(set(range(launch.world_size)) - set(here)):
            print(f"no trace from ranks {missing} within {options.timeout:g} s", file=sys.stderr)
    return code


def main() -> None:
    """Run the command line above."""
    given = sys.argv[1:]
    cut = given.index("--script") + 2 if "--script" in given else len(given)
    run_program(lambda: _profile_script(parse(Options, args=given[:cut]), given[cut:]))  # type: ignore[arg-type,return-value]


if __name__ == "__main__":
    # the ranks that a script spawns must find these functions under the module's own name
    from common.utils import profiler

    profiler.main()
