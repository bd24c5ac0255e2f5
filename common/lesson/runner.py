"""Command line of every lesson: shared options, three ways to start, exit codes.

    python file.py --nproc 4        torchrun --nproc_per_node=4 file.py        mpirun -np 4 python file.py

A lesson ends with `run(main, Options)`; `main(rt, options)` runs on every rank and returns True if the
lesson's claim holds. Exit code 0: proved; 1: it differs, or a rank failed; 2: bad input.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, cast

import torch
from rich.console import Console

from common import comm
from common.comm.checked import asked
from common.data.text import load_text
from common.errors import UsageError
from common.launch import debugger
from common.launch.command_line import Checked, Count, Ranks, Seed, Within, check_folder, parse
from common.launch.launcher import resolve
from common.launch.program import run_program
from common.launch.runtime import Runtime, runtime
from common.launch.spawn import spawn
from common.launch.terminal import terminal
from common.utils.profiler import profiled

PICTURES = (".png", ".svg", ".pdf")
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass
class LessonOptions(Checked):
    """Options that all lessons share."""

    nproc: Ranks | None = None
    """Number of ranks to start on this machine; leave it out under torchrun, mpirun and srun."""
    steps: Count = 3
    """Training steps."""
    seed: Seed = 0
    """Seed of the weights and of the batches."""
    dtype: Literal["float64", "float32"] = "float64"
    """Type of weights and gradients."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors; auto takes a GPU if there is one."""
    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """Library that carries the messages; auto takes NCCL if each rank has its own GPU."""
    timeout: Annotated[float, Within(1e-3, 1e6)] = 60.0
    """Longest time that any wait may last, in seconds."""
    data: Path | None = None
    """Text to train on: a file or a folder; default: Python's standard library."""
    json: Path | None = None
    """File to which the records of this run are appended, one JSON object per line."""
    trace: Path | None = None
    """Folder for a Chrome trace of all ranks; their times are printed at the end."""
    plot: Path | None = None
    """File for this lesson's picture."""
    debug: Annotated[int, Within(0, 4095)] | None = None
    """Rank on which Python's debugger opens, while the others wait."""
    check: bool = False
    """Check on every tensor and collective how it lies on the ranks: docs/types-on-ranks.md."""
    trace_all: ClassVar[bool] = True  # a lesson is short
    reads_input: ClassVar[bool] = False
    """True if rank 0 reads standard input."""
    check_all: ClassVar[bool] = False
    """True if --check checks all of `main`; otherwise the harness checks the runs on several ranks."""

    def look_at_data(self) -> None:
        """Check that the text can be read. Raises UsageError."""
        if self.data is not None:
            load_text(self.data)


O = TypeVar("O", bound=LessonOptions)  # noqa: E741


def console(rt: Runtime) -> Console:
    """Return a console that prints on rank 0 alone.

    Unless it is the user's own terminal, it prints plain text, as wide as needed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # generated text may hold characters that the terminal lacks
    # mpirun gives ranks a terminal of 80 columns
    return terminal(quiet=rt.rank != 0, plain=rt.launcher in ("openmpi", "mpich"))


def write_records(path: Path | None, records: list[dict[str, Any]]) -> None:
    """Append records to a file, one JSON object per line. Raises UsageError if it cannot be written."""
    if path is None:
        return
    try:
        begin = "\n" if _is_cut(path) else ""
        with path.open("a") as file:
            file.write(begin)
            file.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error.strerror}") from None


def _is_cut(path: Path) -> bool:
    """Return True if a crash left the last line without its newline."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def run(
    main: Callable[[Runtime, O], bool],
    options_type: type[O],
    parse: Callable[..., O] = parse,
    versions: Iterable[str] = (),
) -> NoReturn:
    """Parse the command line, run `main` on every rank, exit. versions: the default of --versions."""

    def whole() -> int:
        known = {"default": cast(Any, options_type)(versions=tuple(versions))} if versions else {}
        options = parse(options_type, description=sys.modules[main.__module__].__doc__, **known)
        return 0 if _start(main, options) else 1

    run_program(whole)


NO_MEMORY = (
    "can't allocate memory",
    "Storage size calculation overflowed",
    "Unable to allocate",
    "out of memory",
)


def _within_memory(main: Callable[[Runtime, O], bool], rt: Runtime, options: O) -> bool:
    """Run `main`; raise UsageError if there is not enough memory for the given sizes."""
    try:
        return main(rt, options)
    except (RuntimeError, MemoryError) as error:
        if not any(words in str(error) for words in NO_MEMORY):
            raise
        line = str(error).splitlines()[0]
        raise UsageError(f"there is not enough memory for these sizes; give smaller ones ({line})") from None


def _checked(main: Callable[[Runtime, O], bool], rt: Runtime, options: O) -> bool:
    """Check that the data can be read and that all ranks have the same options; then run `main`."""
    options.look_at_data()
    mine = {field.name: str(getattr(options, field.name)) for field in fields(options)}
    for rank, theirs in enumerate(comm.everyones(mine, rt.world)):
        for name, value in mine.items():
            if theirs[name] != value:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value} on rank {rt.rank} and {theirs[name]} on rank {rank}; "
                    f"give all ranks the same"
                )
    return _with_types(main, rt, options) if options.check else main(rt, options)


def _with_types(main: Callable[[Runtime, O], bool], rt: Runtime, options: O) -> bool:
    """Run `main` under the checker of placements, and say what it cost. Raises UsageError if nothing was checked."""
    if rt.world_size == 1:
        raise UsageError("--check compares ranks, and here is one: give --nproc 2")
    everything = rt.world if options.check_all else None
    with asked.asking(min(30.0, options.timeout / 2)) as blocks, asked.if_asked(everything):
        holds = main(rt, options)
    sent, size = (sum(getattr(b.meeting, what) for b in blocks) for what in ("messages", "bytes"))
    if not sent:
        raise UsageError("--check has nothing to check here: no collective of ours was called")
    console(rt).print(
        f"checked: nothing misplaced; {sent:,} messages of the checker with {size:,} bytes from rank 0"
    )
    return holds


def _start(main: Callable[[Runtime, O], bool], options: O) -> bool:
    launch, timeout = resolve(), options.timeout
    alone = launch.launcher == "none"
    debugger.rank = options.debug
    if options.debug is not None:
        debugger.check(options.debug, launch, (options.nproc or 1) if alone else launch.world_size)
        main, timeout = partial(debugger.debugged, main), debugger.FOREVER
    main = partial(_within_memory, partial(_checked, main))
    write_records(options.json, [])  # fails now if the file cannot be written
    if options.trace and options.trace_all:
        main = partial(profiled, options.trace, main)
    if options.plot:
        if options.plot.suffix.lower() not in PICTURES or options.plot.is_dir():
            raise UsageError(f"--plot {options.plot}: give a file whose name ends in {', '.join(PICTURES)}")
        check_folder("plot", options.plot, options.plot.absolute().parent)
    if alone and (options.nproc or 1) > 1:
        with debugger.kept_terminal():
            results = spawn(
                main,
                options.nproc or 1,
                options,
                timeout=timeout,
                limit=None,
                device=options.device,
                backend=options.backend,
                debug=options.debug,
                reader=0 if options.reads_input else None,
            )
        return all(results)
    if options.nproc not in (None, launch.world_size):
        raise UsageError(
            f"--nproc {options.nproc} contradicts {launch.launcher}, which started {launch.world_size} ranks; "
            f"leave --nproc out under a launcher"
        )
    with runtime(options.device, options.backend, timeout) as rt:
        return main(rt, options)
