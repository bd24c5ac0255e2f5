"""Watchdog: when one rank fails, all ranks end, and the first failure is shown.

Every rank runs a thread that polls the store five times per second. The first rank to fail writes its failure
there; the others read it, write their current place in the code, and end within `GRACE` seconds even if they
are stuck. A killed rank cannot write: the first rank whose collective fails asks all ranks for their place,
and names those that do not answer.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from common.comm import blocked_in
from common.comm.frames import is_users, line_of_call
from common.errors import AbsentRank, RankError, UsageError
from common.launch import debugger
from common.launch.program import WATCHDOG, leave_at_once

LOOK_EVERY = 0.2  # seconds between polls of the store
GRACE = 4.0  # seconds in which a rank must end by itself after another failed
STORE_GONE = "the store is gone: rank 0, or the launcher that held it, was killed"


class RankFailed(Exception):
    """This rank must end with exit code `code`; this rank or the first to fail has shown the reason."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, the argument of sys.exit(), 1 for anything else."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return 2 if isinstance(error, UsageError) else 1


def describe(error: BaseException, rank: int) -> str:
    """Return one line for bad input and a debugger that was left, the traceback for anything else.

    Bad input of a tensor operation is shown with the line of its call.
    """
    if isinstance(error, UsageError):
        line = line_of_call(error)
        return f"error: {error} ({line})" if line and line not in str(error) else f"error: {error}"
    if isinstance(error, RankError):
        return str(error)
    return f"rank {rank} failed:\n" + "".join(traceback.format_exception(error)).rstrip()


def where(stack: traceback.StackSummary) -> str:
    """Return the collective this rank waits in, and the innermost line of the user's code, or the outermost line."""
    users = [f for f in stack if is_users(f.filename)][-1:] or stack[:1]
    found = [f"{f.filename}:{f.lineno} ({f.name})" for f in users]
    if state := dict(blocked_in):
        seconds = time.perf_counter() - float(str(state["since"]))
        found.insert(0, f"in {state['op']} over {state['axis']!r} for {seconds:.1f} s")
    return ", ".join(found) or "unknown"


class Watchdog(threading.Thread):
    """Thread that watches one rank of a world; see the top of the file."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, show: Callable[[str], None]) -> None:
        super().__init__(daemon=True, name=WATCHDOG)
        self.show = show
        # its own connection: a poll must not wait behind another thread's call
        self.store: dist.Store = store.clone() if world_size > 1 else store  # type: ignore[attr-defined]
        self.rank, self.world_size = rank, world_size
        self.done = threading.Event()
        self.someone_failed = False
        self.timeout = 0.0
        self.main = threading.main_thread().ident

    def meet(self, timeout: float) -> None:
        """Wait until every rank has arrived. Raises UsageError that names the missing ones."""
        self.timeout = timeout
        if self.world_size == 1:
            return
        self.store.set(f"here/{self.rank}", "")
        self.start()
        missing = self._missing("here", timeout)
        if missing:
            raise UsageError(
                f"ranks {missing} of {self.world_size} did not arrive within {timeout:g} s; "
                f"start all ranks with the same world size and address"
            )

    def finish(self, timeout: float) -> None:
        """End cleanly: all ranks leave together.

        Other ranks may still be connecting to this one, or need its store.
        """
        if self.world_size > 1:
            self.store.set(f"done/{self.rank}", "")
            blocked_in.update(op="the end of the run", axis="world", since=time.perf_counter())
            if missing := self._missing("done", timeout):
                raise RuntimeError(f"ranks {missing} have not come to their end within {timeout:g} s")
            self.store.set(f"left/{self.rank}", "")
            if self.rank == 0:  # the store ends with it: the others must have seen that all are done
                self._missing("left", timeout)
            blocked_in.clear()
            self.done.set()
            self.join(GRACE)

    def run(self) -> None:
        while not self.done.wait(LOOK_EVERY):
            try:
                failed = self.store.check(["failure"])
            except RuntimeError:
                if self.done.wait(LOOK_EVERY):
                    return
                failed = True
                self.show(f"rank {self.rank}: {STORE_GONE}")
            if failed:
                if not self.someone_failed:
                    self._answer(where(traceback.extract_stack(sys._current_frames().get(self.main or 0))))
                while not self.done.wait(GRACE):
                    if not debugger.at_prompt.is_set():
                        self._wait_for_debugger()
                        leave_at_once(1)

    def failed(self, error: BaseException) -> RankFailed:
        """Show `error` if this rank is the first in the world to fail; return the RankFailed to raise."""
        self.someone_failed = True
        # launchers send SIGTERM to all when one rank dies; this one ends by itself, after its report
        if self.world_size > 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ended, report = RankFailed(exit_code(error)), describe(error, self.rank)
        self._answer(where(traceback.extract_tb(error.__traceback__)))
        try:
            if self.store.add("failures", 1) > 1:
                with suppress(RuntimeError):
                    self.store.wait(["shown"], timedelta(seconds=GRACE))
                time.sleep(3 * LOOK_EVERY)  # the first to fail ends first: launchers blame the first to end
                self._wait_for_debugger()
                return ended
            self.store.set("failure", report)
            if isinstance(error, RuntimeError) and blocked_in:
                report = self._roll_call(error)
        except RuntimeError:
            report = f"rank {self.rank}: {STORE_GONE}\n{report}"
        self.show(report)
        with suppress(RuntimeError):
            self.store.set("shown", "")
        time.sleep(2 * LOOK_EVERY)  # the store may end with this process: let the others read it
        self._wait_for_debugger()
        return ended

    def _wait_for_debugger(self) -> None:
        """Wait until the debugged rank is about to end: launchers end all ranks when the first one ends."""
        with suppress(RuntimeError):  # the store is gone
            if debugger.rank == self.rank:
                self.store.set("debugged", "")
            elif debugger.rank is not None:
                self.store.wait(["debugged"], timedelta(seconds=debugger.FOREVER))

    def _answer(self, place: str) -> None:
        with suppress(RuntimeError):  # the store may be gone, and no rank is left to read it
            self.store.set(f"where/{self.rank}", place)

    def _missing(self, key: str, timeout: float) -> list[int]:
        """Return the ranks that have not written `key` within `timeout` seconds."""
        end = time.monotonic() + timeout
        missing = [r for r in range(self.world_size) if r != self.rank]
        while missing and time.monotonic() < end:
            missing = [r for r in missing if not self.store.check([f"{key}/{r}"])]
            time.sleep(0.01 if missing else 0)
        return missing

    def _roll_call(self, error: BaseException) -> str:
        """Return the report on a broken or timed out collective: each rank's place, or its silence."""
        why = re.sub(r"^(\[.*?\] )+", "", str(error).splitlines()[0])  # the library begins with its own file
        waited = time.perf_counter() - float(str(blocked_in["since"]))
        if waited > 0.9 * self.timeout and not isinstance(error, AbsentRank):
            why = f"timed out after {self.timeout:g} s"  # the library blames the other rank, which timed out first
        lines = [f"rank {self.rank} failed {where(traceback.extract_tb(error.__traceback__))}: {why}"]
        silent = self._missing("where", 10 * LOOK_EVERY)
        for rank in range(self.world_size):
            if rank in silent:
                lines.append(f"  rank {rank} does not answer: it was killed, or hangs outside Python")
            elif rank != self.rank:
                lines.append(f"  rank {rank} stood {self.store.get(f'where/{rank}').decode()}")
        return "\n".join(lines)
