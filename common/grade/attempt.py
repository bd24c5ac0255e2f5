"""One grading: the exercise's module is loaded on every rank, and its targets are tried in order.

The first target that is missed ends the grading. A rank that raises ends all others; where ranks wait for one
another for ever, the watchdog says where each of them stands.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
import zlib
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from common import comm
from common.comm import blocked_in, ledger
from common.errors import RankError, UsageError
from common.grade.cpp import attempt_in_cpp
from common.grade.exercises import Exercise, Outcome, refused
from common.grade.targets import Target, Wrong
from common.launch.runtime import Runtime
from common.launch.spawn import spawn

WAIT = 20.0  # seconds that a rank may wait for another
LONGEST = 400  # characters of an exception's message


def load(source: str, path: Path) -> ModuleType:
    """Run the source of a file as a module of its own, which no other module can import by name."""
    module = ModuleType(f"graded {path.parent.name} {path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def targets_of(exercise: Exercise) -> tuple[list[Target], frozenset[str]]:
    """Return the targets of an exercise, and the further modules that it allows."""
    module = load(exercise.targets.read_text(), exercise.targets)
    found = [x.target for x in vars(module).values() if isinstance(getattr(x, "target", None), Target)]
    return found, frozenset(getattr(module, "ALLOWED", ()))


def _try(rt: Runtime, exercise: Exercise, source: str, seed: int, progress: Path | None) -> Outcome:
    """Try the targets in order; return the outcome, the same on all ranks."""
    targets, _ = targets_of(exercise)
    names = tuple(t.name for t in targets)
    try:
        mine = load(source, exercise.path)
    except (Exception, SystemExit) as error:
        raise UsageError(json.dumps([0, _raised(error, exercise, 0, 1)])) from error
    for number, target in enumerate(targets):
        if progress and rt.rank == 0:
            progress.write_text(str(number))
        for size in target.ranks:
            wrong, to_write = "", False
            if rt.rank < size:
                group = rt.world.part("world", range(size))
                rng = torch.Generator().manual_seed(seed + zlib.crc32(f"{target.name} {size}".encode()))
                try:
                    target.check(mine, group, rng)
                except Wrong as error:
                    wrong = f"on {size} ranks, rank {rt.rank}: {error}" if size > 1 else str(error)
                except NotImplementedError as error:
                    wrong, to_write = str(error) or "write what raises NotImplementedError", True
                except (Exception, SystemExit) as error:
                    if blocked_in:  # in a message: the watchdog asks all ranks where they stand
                        raise
                    raise UsageError(json.dumps([number, _raised(error, exercise, rt.rank, size)])) from error
            if progress and wrong:  # ranks that go on may wait for this one for ever
                progress.with_name(f"missed-{rt.rank}").write_text(json.dumps((wrong, to_write)))
            if (found := _agree(rt, wrong, to_write))[0]:
                return Outcome(names, number, *found)
    return Outcome(names, len(names))


def _agree(rt: Runtime, wrong: str, to_write: bool) -> tuple[str, bool]:
    """Return what the first rank that missed the target says, and whether it is still to be written.

    The names that torch gives to new process groups depend on how many a rank has made: ranks that were not
    needed for a target make up for theirs with groups of one.
    """
    with ledger.uncounted():
        ranks = comm.everyones((wrong, to_write, len(_world.pg_names)), rt.world)
    for _ in range(max(made for *_, made in ranks) - ranks[rt.rank][2]):
        dist.new_group([rt.rank], use_local_synchronization=True)
    return next(((said, to_write) for said, to_write, _ in ranks if said), ("", False))


def _raised(error: BaseException, exercise: Exercise, rank: int, size: int) -> str:
    """Return what an exception in the answer says, with its line."""
    lacks = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    if isinstance(lacks, ModuleType) and lacks.__file__ == str(exercise.path):
        return f"{exercise.path.name} has no {error.name}"  # type: ignore[attr-defined]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(exercise.path)]
    line = f" in line {frames[-1].lineno}, `{frames[-1].line}`" if frames else ""
    said = next(iter(str(error).splitlines()), "")[:LONGEST]
    where = f"on {size} ranks, rank {rank}" if size > 1 else "it"
    return f"{where} raised {type(error).__name__}{line}: {said}"


def tried(rt: Runtime, exercise: Exercise, sources: list[str], seed: int) -> list[Outcome]:
    """Return the outcomes of several answers that neither raise nor hang, on ranks started once."""
    return [_try(rt, exercise, source, seed, None) for source in sources]


def attempt(exercise: Exercise, seed: int, source: str | None = None, wait: float = WAIT) -> Outcome:
    """Grade the exercise's file, or `source` in its place, on as many ranks as its targets need."""
    try:
        source = exercise.path.read_text(encoding="utf-8-sig") if source is None else source
    except OSError as error:
        return Outcome(("the file",), 0, f"{exercise.path.name} cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        return Outcome(("the file",), 0, f"line {line} is not in UTF-8: save the file with that encoding")
    if exercise.path.suffix == ".cpp":
        return attempt_in_cpp(exercise, seed, source, wait)
    targets, also = targets_of(exercise)
    names = tuple(t.name for t in targets)
    try:
        if why := refused(source, also):
            return Outcome(names, 0, why)
    except SyntaxError as error:
        return Outcome(names, 0, f"line {error.lineno or 1} is no Python: {error.msg}")
    except (MemoryError, RecursionError, ValueError) as error:  # nested too deeply; null bytes
        return Outcome(names, 0, f"it is no Python: {str(error) or 'an expression is nested too deeply'}")
    world = max(max(t.ranks) for t in targets)
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "target"
        try:
            ranks: list[Outcome] = spawn(
                _try, world, exercise, source, seed, progress, timeout=wait, limit=wait + 5 * len(targets)
            )
        except RankError as error:
            met = int(progress.read_text()) if progress.exists() else 0
            if missed := sorted(Path(folder).glob("missed-*")):
                return Outcome(names, met, *json.loads(missed[0].read_text()))
            return Outcome(names, *_failed(str(error), met, exercise))
    return ranks[0]


def _failed(report: str, met: int, exercise: Exercise) -> tuple[int, str]:
    """Return (targets met, what was wrong) from a rank's report."""
    if report.startswith("error: ["):
        met, wrong = json.loads(report.removeprefix("error: ").splitlines()[0])
        return met, wrong
    places = re.findall(r"rank (\d+) (?:failed|stood|stands) (.*)", report)
    if not places:
        size = ": a message has another size than its receiver's tensor" if "SIGABRT" in report else ""
        return met, report.strip().splitlines()[-1] + size
    stands, waiting = [], False
    for rank, place in sorted(places):
        line = re.search(rf"{re.escape(exercise.path.name)}:(\d+)", place)
        call = re.search(r"in (\w+(?: (?:to|from) [\d, a-z]+?)?) over", place)
        waits, waiting = f"waits in {call[1]}" if call else "stands", waiting or bool(line and call)
        stands.append(f"rank {rank} " + (f"{waits}, line {line[1]}" if line else "has ended its part"))
    why = "the ranks wait for one another" if waiting else "it does not end"
    return met, f"{why}: " + "; ".join(stands)
