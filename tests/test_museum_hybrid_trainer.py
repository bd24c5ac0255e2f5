"""Museum of silent bugs, a resumed run: its loss curve looks right, but it differs from an uninterrupted run.

Four steps on two ranks, the last two after a restart, are compared with four steps on one device. The bugs
concern the order of the data, and dropout, whose random state must differ between ranks with different
activations and agree between replicas. `pytest -s tests/test_museum_hybrid_trainer.py` prints the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from museum import Found, tour
from torch import Tensor
from training_runs import on_one_device

from common.launch.runtime import Runtime
from common.lesson.equality import OPTIMIZERS, Difference, Followed, compare, watch
from common.lesson.training import Batches
from common.models.configs import CONFIGS, gpt2
from common.models.dropout import Dropout

from hybrid_layout import HybridOptions
from hybrid_training import make_job, train

CONFIGS["museum-run"] = replace(gpt2(layers=2, width=16, heads=2, sequence=8), dropout=0.2)
OPTIONS = HybridOptions(model="museum-run", batch=4, sequence=8, steps=4)
RESUMED = 2  # steps before the restart


@dataclass
class Exhibit:
    """A mesh; the batch of step t after the restart; the step, first sample and seed that dropout uses."""

    mesh: dict[str, Any] = field(default_factory=lambda: dict(dp=2))
    batch: Callable[[int], int] = lambda t: t
    dropout: Callable[[Dropout, int], tuple[int, int, int]] = lambda d, rank: (d.step, d.first_sample, d.seed)


EXHIBITS = {
    # the number of the last step was saved, not that of the next
    "a batch seen twice": Exhibit(batch=lambda t: t - 1),
    # the loader had the next batch ready when its state was saved
    "a batch never seen": Exhibit(batch=lambda t: t + 1),
    # the loader is new, and nobody told it where it was
    "the data from the beginning": Exhibit(batch=lambda t: t - RESUMED),
    # every rank has the same seed and draws for the samples it has: replicas drop the same places
    "masks equal over dp": Exhibit(dropout=lambda d, rank: (d.step, 0, d.seed)),
    # every rank has its own seed: what all ranks along tp hold in common is dropped otherwise on each
    "masks different over tp": Exhibit(
        dict(dp=1, tp=2), dropout=lambda d, rank: (d.step, d.first_sample, d.seed + rank)
    ),
    # the random state was not in the checkpoint
    "masks from the beginning": Exhibit(dropout=lambda d, rank: (d.step % RESUMED, d.first_sample, d.seed)),
    "right": Exhibit(),
    "right over tp": Exhibit(dict(dp=1, tp=2)),
    "right over tp, its tokens in slices": Exhibit(dict(dp=1, tp=2, sequence_parallel=True)),
    "right over pp": Exhibit(dict(dp=1, pp=2, checkpointing=True)),
}


@functools.cache
def alone(rt: Runtime, optimizer: str) -> Followed:
    """Return the run on one device, the same for all exhibits."""
    return on_one_device(rt, OPTIONS, optimizer)


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return an exhibit's differences from one device on this rank."""
    exhibit = EXHIBITS[name]
    o = replace(OPTIONS, **exhibit.mesh)
    mesh, forward, take = o.mesh(rt), Dropout.forward, Batches.take

    def dropped(self: Dropout, x: Tensor, positions_S: Tensor) -> Tensor:
        right = self.step, self.first_sample, self.seed
        self.step, self.first_sample, self.seed = exhibit.dropout(self, rt.rank)
        try:
            return forward(self, x, positions_S)
        finally:
            self.step, self.first_sample, self.seed = right

    def taken(self: Batches, t: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        return take(self, t if t < RESUMED else exhibit.batch(t), lo, hi)

    expected, job = alone(rt, optimizer), make_job(rt, o, mesh, OPTIMIZERS[optimizer], o.steps)
    with patch.object(Dropout, "forward", dropped), patch.object(Batches, "take", taken):
        return compare(expected, watch(train(job), job, mesh))


def caught(name: str, found: Found) -> None:
    assert all(differences["gradients"].value > 1e-3 for differences in found.values())
    assert found["sgd"]["weights"].value > 1e-5


visited, test_exhibit = tour(visit, EXHIBITS, caught)
