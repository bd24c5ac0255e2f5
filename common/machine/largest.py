"""Search for the largest batch that fits into memory: doubling, then bisection, each try in processes of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from common.errors import UsageError
from common.launch.launcher import resolve
from common.launch.runtime import runtime
from common.machine.tool import ToolOptions, finish
from common.machine.verdict import of, write_log

NO_MEMORY = ("out of memory", "not enough memory", "SIGKILL")  # the last is the system's when memory is full


def fits(command: Sequence[str]) -> bool:
    """Run a try, whose processes take a failed allocation's memory with them.

    Raises UsageError if it fails for another reason than memory.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not any(words in done.stderr for words in NO_MEMORY):
        why = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(f"a try failed, not for lack of memory: {why[-1] if why else 'no output'}")
    return done.returncode == 0


def largest_batch(try_batch: Callable[[int], bool], most: int) -> int:
    """Return the largest batch from 0 to `most` that fits: doubling from 2, then bisection."""
    good, bad, batch = 0, most + 1, min(2, most)
    while good + 1 < bad:
        if try_batch(batch):
            good = batch
        else:
            bad = batch
        batch = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


def find_largest(o: ToolOptions, title: str, command: Callable[[int], Sequence[str]], most: int) -> int:
    """Search, print, and return the exit code. command: of a try with that batch per rank."""
    if resolve().launcher != "none":
        raise UsageError("--largest starts its own ranks; run it without a launcher")
    write_log(o.log, "")  # fails now if it cannot be written
    tries: dict[int, bool] = {}

    def try_batch(batch: int) -> bool:
        tries[batch] = fits(command(batch))
        print(f"batch {batch}: {'fits' if tries[batch] else NO_MEMORY[0]}", flush=True)
        return tries[batch]

    found = largest_batch(try_batch, most)
    cure = "take a smaller image, --amp or --strategy fsdp"
    lines = [of(found > 0, "largest batch", f"{found} per rank, of at most {most}", cure)]
    with runtime("cpu") as rt:
        return 0 if finish(rt, o, "largest", lines, title, largest=found, tries=tries) else 1
