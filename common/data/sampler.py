"""The order in which samples are seen: endless, shuffled anew in every epoch, the same on every mesh.

    position   0  1  2  3  4  5  6 | 7  8  9 10 11 12 13 | 14 15 ...       7 samples
    sample     3  0  6  1  5  2  4 | 2  6  0  4  3  1  5 |  1  6 ...       each epoch holds every sample once
    batches   [          ][           ][            ][          ...        of 4: step t has positions 4t to 4t+3

    lo, hi = rank_slice(batch, rank, size)
    mine = samples_at(seed, samples, step * batch + lo, step * batch + hi)

A batch is a range of positions, and a rank's part is a range of the batch. So there is no end of an epoch to pad or to
drop: a batch may begin in one epoch and end in the next. There is no state: a run resumes at any step, on any
number of ranks, by naming that step.

The order of an epoch sorts the samples by their random bits. Samples have different bits, because mixing is a
bijection, so every method of sorting gives the same order. It takes 8 bytes and about 0.1 µs a sample.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from common import random
from common.errors import UsageError

Indices = NDArray[np.int64]


@lru_cache(maxsize=2)  # a batch lies in one epoch or in two
def epoch_order(seed: int, epoch: int, samples: int) -> Indices:
    """The samples 0 to samples - 1 in the order of this epoch, int64, read only."""
    order = np.argsort(random.bits(seed, random.stream_of(f"epoch {epoch}"), np.arange(samples)))
    order.setflags(write=False)
    return order


def samples_at(seed: int, samples: int, lo: int, hi: int) -> Indices:
    """The samples at positions [lo, hi) of the endless order, int64 [hi - lo].

    An epoch is positions [epoch * samples, (epoch + 1) * samples). Raises UsageError when there are no samples or
    the range runs backwards.
    """
    if samples < 1 or not 0 <= lo <= hi:
        raise UsageError(
            f"positions {lo} to {hi} of {samples} samples: give 0 <= lo <= hi and at least 1 sample"
        )
    epochs = range(lo // samples, -(-hi // samples))
    pieces = [
        epoch_order(seed, e, samples)[max(lo - e * samples, 0) : min(hi - e * samples, samples)]
        for e in epochs
    ]
    return np.concatenate([np.empty(0, np.int64), *pieces])
