"""Museum of silent bugs, one process for all devices: the broken step is caught, the right one passes."""

from __future__ import annotations

from beside_one_device import alone
from museum import Found, tour
from steps import follow
from torch import Tensor

from common import comm
from common.launch.runtime import Runtime
from common.lesson.equality import Difference, compare
from common.lesson.training import make_model

from dp_data_parallel import LESSON, OneProcess
from dp_training import DataParallelOptions

# 7 samples on 2 ranks: 4 and 3
OPTIONS = DataParallelOptions(model="gpt2-tiny", batch=7, sequence=12, steps=3, micro_batches=1)


class ReplicatesOnce(OneProcess):
    """Broken: helpers keep the weights of the first step."""

    done = False

    def replicate(self) -> None:
        if not self.done:
            super().replicate()
        self.done = True


class MeanOfMeans(OneProcess):
    """Broken for uneven shards: averages the devices' mean losses, each over the device's samples."""

    def loss_on_rank_0(self, logits_bSV: Tensor, targets_BS: Tensor | None) -> tuple[Tensor, Tensor]:
        dlogits_bSV, loss = super().loss_on_rank_0(logits_bSV, targets_BS)
        mine = self.samples[self.group.rank]
        return dlogits_bSV * (sum(self.samples) / (mine * self.group.size)), loss


EXHIBITS = {
    "weights replicated once": ReplicatesOnce,
    "the mean of means": MeanOfMeans,
    "right": OneProcess,
}


def visit(rt: Runtime, name: str, optimizer: str) -> dict[str, Difference]:
    """Return rank 0's differences from one device on each rank: the others hold no gradients."""
    model, found = make_model(OPTIONS, rt.device), {}
    one = EXHIBITS[name](model, OPTIONS, rt.world, rt.device)
    if rt.rank == 0:
        followed = follow(model, optimizer, OPTIONS.steps, one.step)
        reference, _ = alone(rt, OPTIONS, LESSON, "one process", optimizer)
        found = compare(reference, followed)
    else:
        for t in range(OPTIONS.steps):
            one.step(t)
    return comm.everyones(found, rt.world)[0]


def caught(name: str, found: Found) -> None:
    assert found["sgd"]["gradients"].value > 1e-3
    assert found["sgd"]["weights"].value > 1e-5


visited, test_exhibit = tour(visit, EXHIBITS, caught)
