"""The loss on text that training does not see: forward passes alone, on every mesh the same number.

A sum over tokens, divided by their number, as in training. Samples are cut over dp and ep and tokens over sp as in
training, too; without a backward pass nothing is kept, and stages need no schedule but their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hybrid_data import Shuffled
from hybrid_model import Hybrid

from common import comm


@contextmanager
def evaluating(hybrid: Hybrid) -> Iterator[None]:
    """Dropout is off inside."""
    hybrid.model.eval()
    try:
        yield
    finally:
        hybrid.model.train()


def validation_loss(hybrid: Hybrid, batches: Shuffled) -> float:
    """Nats a token over the first samples of the validation text, the same on all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=batches.device)  # of losses, and of targets
    with evaluating(hybrid):
        for first in range(0, batches.evaluated, batches.options.batch):
            parts = [hybrid.split(*part) for part in batches.validation(first)]
            sums[0] += hybrid.pipe.evaluate(parts)
            sums[1] += sum((targets_Bs != -100).sum() for *_, targets_Bs in parts)
    comm.all_reduce(sums, hybrid.tokens)
    return float(sums[0] / sums[1])
