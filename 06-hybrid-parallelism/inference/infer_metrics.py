"""Times of a program that generates text: tokens per second, time to the first token, bytes of the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from rich.table import Table

from common.launch.terminal import make_table

from infer_engine import Engine, cache_bytes
from infer_scheduler import Sequence


@dataclass
class Times:
    """Clock readings of a sequence, in seconds."""

    added: float
    first: float = 0.0
    last: float = 0.0


@dataclass
class Meter:
    """Times of all sequences, and the seconds of all forward passes."""

    times: dict[int, Times] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    tokens: int = 0

    def start(self, sequences: Row[Sequence]) -> None:
        """Note that these sequences wait from now on."""
        self.times |= {s.number: Times(time.perf_counter()) for s in sequences}

    def add(self, chosen: Row[tuple[Sequence, int]], begin: float) -> None:
        """Count the tokens of a step that has begun at that time."""
        now = time.perf_counter()
        self.steps.append(now - begin)
        self.tokens += len(chosen)
        for sequence, _ in chosen:
            found = self.times[sequence.number]
            found.first, found.last = found.first or now, now

    def record(self, sequence: Sequence) -> dict[str, object]:
        """Return what is known of an ended sequence, in tokens and seconds."""
        t = self.times[sequence.number]
        return {
            "prompt_tokens": len(sequence.request.prompt),
            "tokens": len(sequence.written),
            "ended": sequence.ended,
            "seconds_to_first": t.first - t.added,
            "seconds": t.last - t.added,
        }

    def table(self, engine: Engine, sequences: Row[Sequence]) -> Table:
        """Return the table of times and bytes; those of the cache are rank 0's."""
        records = [self.record(s) for s in sequences]
        first = [float(str(r["seconds_to_first"])) for r in records]
        taken, size = engine.scheduler.peak, engine.blocks.size
        held = cache_bytes(engine.config, engine.mesh, engine.dtype, taken * size)
        rows = [
            ("requests", f"{len(sequences)}"),
            ("tokens written", f"{self.tokens:,}"),
            ("forward passes", f"{len(self.steps):,}, median {1e3 * statistics.median(self.steps):.1f} ms"),
            ("tokens/s", f"{self.tokens / sum(self.steps):,.1f}"),
            (
                "time to first token",
                f"median {1e3 * statistics.median(first):.1f} ms, longest {1e3 * max(first):.1f} ms",
            ),
            (
                "cache per token",
                f"{cache_bytes(engine.config, engine.mesh, engine.dtype, 1):,} bytes on a rank",
            ),
            (
                "largest use of the cache",
                f"{taken} of {engine.blocks.count} blocks of {size} tokens, {held:,} bytes",
            ),
        ]
        if engine.scheduler.preempted:
            rows.append(("returned to wait for a block", f"{engine.scheduler.preempted}"))
        return make_table("generated", ["", ""], rows)
