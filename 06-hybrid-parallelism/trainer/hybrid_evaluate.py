"""Validation loss: forward passes on text that training does not see, the same number on every mesh.

As in training, the loss is a sum over tokens divided by their number, samples are split over dp and ep, and
tokens over sp. Without a backward pass no activations are kept, and the stages run in their order, without a
schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common import comm

from hybrid_data import Shuffled
from hybrid_model import Hybrid


@contextmanager
def evaluating(hybrid: Hybrid) -> Iterator[None]:
    """Switch dropout off inside the block."""
    hybrid.model.eval()
    try:
        yield
    finally:
        hybrid.model.train()


def validation_loss(hybrid: Hybrid, batches: Shuffled) -> float:
    """Return the loss in nats per token over the samples of an evaluation, the same on all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=batches.device)  # of losses, and of targets
    with evaluating(hybrid):
        for first in range(0, batches.evaluated, batches.options.batch):
            parts = [hybrid.split(*part) for part in batches.validation(first)]
            sums[0] += hybrid.pipe.evaluate(parts)
            sums[1] += sum((targets_Bs != -100).sum() for *_, targets_Bs in parts)
    comm.all_reduce(sums, hybrid.tokens)
    return float(sums[0] / sums[1])
