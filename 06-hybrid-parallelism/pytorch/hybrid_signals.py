"""What a rank is told from outside, and how all come to know it.

    SIGTERM, SIGINT     stop after this step, with a checkpoint
    SIGUSR1             trace the next step

A signal reaches one rank, or all at different moments, while ranks may leave the loop only together. So a handler
notes it and nothing else. The notes travel with the gradient's norm, which is summed over the world in every step
anyway: then all ranks know the same, in the same step.

Ranks that this Python started itself (--nproc) are behind the process that one sees; it passes on what it gets.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from types import FrameType, TracebackType

STOP = (signal.SIGTERM, signal.SIGINT)
TRACE = signal.SIGUSR1


class Signals:
    """Notes of this rank, while the `with` block runs."""

    def __enter__(self) -> Signals:
        self.stop = self.trace = False
        self.before = {number: signal.signal(number, self._note) for number in (*STOP, TRACE)}
        return self

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == TRACE:
            self.trace = True
        else:
            self.stop = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():  # told twice, it is still on its way out
            signal.signal(number, signal.SIG_IGN if self.stop and number in STOP else handler)


def pass_on() -> None:
    """From now on the ranks that this process has started get its signals; without any, they do what they did."""
    for number in (*STOP, TRACE):
        signal.signal(number, _to_ranks)


def _to_ranks(number: int, _: FrameType | None) -> None:
    ranks = [rank.pid for rank in multiprocessing.active_children() if rank.pid]
    if not ranks and number != TRACE:  # without a step there is nothing to trace
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for pid in ranks:
        os.kill(pid, number)
