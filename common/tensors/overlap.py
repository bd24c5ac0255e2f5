"""The best number of chunks of an operation in which one chunk travels while the next is computed.

Of n equal chunks the first must be computed, or have arrived, before anything else can overlap with it, and each chunk
costs a start:

    T(n) = max(Tc, Tm) + min(Tc, Tm) / n + n o          Tc compute, Tm communication, o overhead of a chunk
    T'(n) = 0   at   n* = sqrt(min(Tc, Tm) / o)         T(n*) = max(Tc, Tm) + 2 sqrt(o min(Tc, Tm))

Assumed: chunks take equal times; computing and sending do not slow each other down; the overhead of a chunk, which is
its messages' latency and the start of its smaller product, does not depend on n. Against no overlap, Tc + Tm, the
gain is at most 2, at Tc = Tm and o = 0.
"""

from __future__ import annotations

import math

from common.errors import UsageError


def seconds(n: int, compute: float, communication: float, overhead: float) -> float:
    """Return T(n) of n chunks, in seconds like the arguments."""
    if n < 1:
        raise UsageError(f"{n} chunks: give at least 1")
    longer, shorter = max(compute, communication), min(compute, communication)
    return longer + shorter / n + n * overhead


def best_chunks(compute: float, communication: float, overhead: float, most: int = 64) -> int:
    """Return the whole number of chunks, from 1 to `most`, with the shortest T(n)."""
    if min(compute, communication, overhead) < 0 or most < 1:
        raise UsageError("compute, communication and overhead must not be negative, and `most` at least 1")
    shorter = min(compute, communication)
    best = most if overhead == 0 else math.sqrt(shorter / overhead)
    below = min(max(1, math.floor(best)), most)
    return min((below, min(below + 1, most)), key=lambda n: seconds(n, compute, communication, overhead))


def estimate_overlap_benefit(compute: float, communication: float, overhead: float, most: int = 64) -> float:
    """Return how many times faster the best number of chunks is than no overlap; from 1 to below 2."""
    n = best_chunks(compute, communication, overhead, most)
    without = compute + communication
    return max(1.0, without / seconds(n, compute, communication, overhead)) if without else 1.0
