"""Signals to one rank, and how all ranks react to them together.

    SIGTERM, SIGINT     stop after this step, with a checkpoint
    SIGUSR1             trace the next step

A signal reaches one rank, or all at different moments, while ranks may leave the loop only together. So a
handler only sets a flag. The flags are summed over the world in one message with the gradient's norm, in
every step: all ranks then have the same flags in the same step.

Ranks that this Python started itself (--nproc) are children of the process that the user sees, which forwards
its signals to them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from types import FrameType

STOP = (signal.SIGTERM, signal.SIGINT)
TRACE = signal.SIGUSR1


class Signals:
    """Flags that this rank's signal handlers set, inside the `with` block."""

    def __enter__(self) -> Signals:
        self.stop = self.trace = False
        self.before = {number: signal.signal(number, self._note) for number in (*STOP, TRACE)}
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == TRACE:
            self.trace = True
        else:
            self.stop = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():  # further stop signals must not interrupt the end
            signal.signal(number, signal.SIG_IGN if self.stop and number in STOP else handler)


def pass_on() -> None:
    """Forward this process's signals to the ranks that it starts; without ranks the stop signals end it."""
    for number in (*STOP, TRACE):
        signal.signal(number, _to_ranks)


def _to_ranks(number: int, _: FrameType | None) -> None:
    ranks = [rank.pid for rank in multiprocessing.active_children() if rank.pid]
    if not ranks and number != TRACE:  # without a step there is nothing to trace
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for pid in ranks:
        os.kill(pid, number)
