"""Museum of silent bugs, one process for all devices: the broken step is caught, the right one passes."""

from __future__ import annotations

import pytest
from museum import show
from torch import Tensor

from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Difference, compare, follow
from common.lesson.training import make_model

from dp_data_parallel import OneProcess, alone
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


def broken(rt: Runtime, kind: type[OneProcess]) -> dict[str, dict[str, Difference]]:
    found = {}
    for optimizer in OPTIMIZERS:
        model = make_model(OPTIONS, rt.device)
        one = kind(model, OPTIONS, rt.world, rt.device)
        if rt.rank == 0:
            followed = follow(model, optimizer, OPTIONS.steps, one.step)
            reference = alone(rt, OPTIONS, optimizer)
            found[optimizer] = compare(reference, followed)
        else:
            for t in range(OPTIONS.steps):
                one.step(t)
    return found


@pytest.mark.parametrize("kind", [ReplicatesOnce, MeanOfMeans])
def test_what_goes_wrong_in_silence_is_caught(kind: type[OneProcess]) -> None:
    found = spawn(broken, 2, kind)[0]
    show(kind.__name__, found)
    assert found["sgd"]["gradients"].value > 1e-3
    assert found["sgd"]["weights"].value > 1e-5
    right = spawn(broken, 2, OneProcess)[0]  # the same way
    assert max(d.value for d in right["sgd"].values()) <= 1e-12
