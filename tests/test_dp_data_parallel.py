"""nn.DataParallel played by ranks: equal to one device, bytes and logits by rank, and two wrong versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside_one_device import alone, on_ranks
from mpi.launch import refusal

from common.comm import sizes_of
from common.comm.ledger import Ledger
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, compare
from common.lesson.training import make_model

from dp_costs import bytes_by_rank
from dp_data_parallel import LESSON, OneProcess, main
from dp_training import DataParallelOptions

STEPS = 2


def options(batch: int) -> DataParallelOptions:
    versions = tuple(LESSON.versions)
    return DataParallelOptions(
        versions=versions, model="gpt2-tiny", batch=batch, sequence=12, steps=STEPS, micro_batches=1
    )


def visit(rt: Runtime, batch: int) -> dict[str, Any]:
    """Return the largest differences on rank 0, and this rank's bytes sent, logits bytes, gradient count."""
    o = options(batch)
    found: dict[str, Any] = {"sent": [], "gradients": []}
    for optimizer in OPTIMIZERS:
        for version in LESSON.versions:
            with Ledger() as ledger:
                followed, job = on_ranks(rt, o, LESSON, version, optimizer)
            if rt.rank == 0:
                reference, _ = alone(rt, o, LESSON, version, optimizer)
                differences = compare(reference, followed)
                found[f"{version}, {optimizer}"] = max(d.value for d in differences.values())
            if version == "one process":
                found["sent"].append(ledger.bytes())
                found["gradients"].append(sum(p.grad is not None for p in job.model.parameters()))
    one = OneProcess(make_model(o, rt.device), o, rt.world, rt.device)
    one.step(0)
    found["logits"] = one.logits_bytes
    return found


# 9 samples are uneven on 2, 4 and 8 ranks, 10 on 3
@pytest.mark.parametrize(("world", "batch"), [(1, 3), (2, 9), (3, 10), (4, 9), (8, 9)])
def test_equal_to_one_device_and_bytes_by_rank(world: int, batch: int) -> None:
    by_rank = spawn(visit, world, batch)
    for version in (f"{name}, {optimizer}" for name in LESSON.versions for optimizer in OPTIMIZERS):
        assert by_rank[0][version] <= 1e-12, version
    model = make_model(options(batch), torch.device("cpu"))
    W, V = 8 * sum(p.numel() for p in model.parameters()), model.config.vocabulary
    for rank, found in enumerate(by_rank):
        samples = sizes_of(batch, world)[rank]
        others = batch - sizes_of(batch, world)[0]
        owner = (
            others * 12 * 8 + (world - 1) * W + others * 12 * V * 8
        )  # tokens, weights, gradients of logits
        helper = samples * 12 * V * 8 + W  # logits, gradients of weights
        assert found["sent"] == [STEPS * (helper if rank else owner)] * 2
        assert found["sent"][0] == STEPS * bytes_by_rank(model, options(batch), world)[rank][0]
        assert found["logits"] == (batch if rank == 0 else samples) * 12 * V * 8
        assert all(found["gradients"]) == (rank == 0)
    everything = bytes_by_rank(model, options(batch), world)
    assert sum(sent for sent, _ in everything) == sum(received for _, received in everything)


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(
        main, DataParallelOptions, capsys, "--nproc", "3", "--batch", "2", "--versions", "bucketed"
    )
    assert line.endswith(
        "--batch 2 is too small for 3 ranks; give at least 3, so that each rank has a sample"
    )
