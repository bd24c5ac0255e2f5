"""Seconds of named sections of a program, on the rank that runs it: `start(name)`, `end(name)`, `print_summary()`."""

from __future__ import annotations

import statistics
import time

import torch

from common.errors import UsageError
from common.launch.terminal import make_table, terminal


class Profiler:
    """Times sections by name. enabled: False makes every method return at once.

    The GPU's work is waited for, so that a section is timed and not its launch. `common.utils.profiler` shows what
    all ranks do, by kernel and by collective.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.seconds: dict[str, list[float]] = {}
        self._running: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Begin a section. Raises UsageError if it runs already."""
        if not self.enabled:
            return
        if name in self._running:
            raise UsageError(f"section {name!r} runs already: end it before it starts again")
        self._running[name] = self._now()

    def end(self, name: str) -> None:
        """End a section. Raises UsageError if it does not run."""
        if not self.enabled:
            return
        if name not in self._running:
            raise UsageError(f"section {name!r} does not run: start it first")
        self.seconds.setdefault(name, []).append(self._now() - self._running.pop(name))

    def print_summary(self) -> None:
        """Print calls, total, median and largest seconds of each section, the longest first."""
        if not self.enabled:
            return
        rows = [
            (name, str(len(s)), f"{sum(s):.4f}", f"{statistics.median(s):.4f}", f"{max(s):.4f}")
            for name, s in sorted(self.seconds.items(), key=lambda item: -sum(item[1]))
        ]
        terminal(plain=True).print(
            make_table("seconds", ("section", ">calls", ">total", ">median", ">largest"), rows)
        )

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()
