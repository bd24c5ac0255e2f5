"""Gradient sums that begin in the last backward pass: equal to sums afterwards, sent early, and in one order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Followed, compare, unequal_replicas, watch, worst
from common.models.configs import CONFIGS, TransformerConfig, gpt2, llama, mixtral
from common.models.transformer import Layer

from dp_zero import Zero
from hybrid_layout import HybridOptions
from hybrid_training import make_job, train

SIZES = dict(layers=4, width=16, heads=4, sequence=16, vocabulary=257)
CONFIGS["overlap-gpt2"] = gpt2(**SIZES)  # type: ignore[arg-type]
CONFIGS["overlap-llama"] = llama(**SIZES, kv_heads=2, mlp_width=12)  # type: ignore[arg-type]
CONFIGS["overlap-tied"] = replace(CONFIGS["overlap-llama"], tied=True)
CONFIGS["overlap-moe"] = mixtral(**SIZES, kv_heads=2, mlp_width=12, experts=4)  # type: ignore[arg-type]


def case(model: str, **given: Any) -> HybridOptions:
    return HybridOptions(model=f"overlap-{model}", batch=9, sequence=16, steps=2, **given)


FEW = [
    case("gpt2", pp=2, dp=2, schedule="zb-v", micro_batches=3),
    case("tied", dp=4, schedule="interleaved"),  # both stages of a rank add to the tied matrix
    case("moe", dp=2, ep=2, zero=1),
]
MORE = [
    *(case("tied", pp=2, dp=2, schedule=name) for name in ("gpipe", "1f1b", "interleaved", "zb-h1")),
    *(case("tied", pp=2, dp=2, schedule=name, zero=1) for name in ("1f1b", "interleaved", "zb-v")),
    *(case("gpt2", dp=4, schedule=name) for name in ("zb-h1", "zb-v", "interleaved")),
    *(case("llama", dp=2, tp=2, sequence_parallel=True, zero=zero) for zero in (0, 1, 2, 3)),
    *(case("moe", dp=2, ep=2, zero=zero) for zero in (0, 2, 3)),
    case("moe", pp=2, ep=2, schedule="zb-h1", clip=0.3),
    case("moe", ep=2, tp=2, sequence_parallel=True, checkpointing=True),
    case("llama", pp=2, sp=2, schedule="zb-v"),
    case("llama", dp=2, sp=2, attention="ring", zero=1),
]
MOST = [
    case("moe", pp=2, dp=2, ep=2, schedule="zb-v"),
    case("moe", pp=2, ep=2, tp=2, schedule="interleaved", sequence_parallel=True),
    case("moe", dp=2, sp=2, tp=2, zero=1, clip=0.3),
    case("tied", pp=4, dp=2, schedule="1f1b", micro_batches=4),
    case("tied", pp=2, dp=2, tp=2, schedule="zb-h1", sequence_parallel=True, zero=1),
    case("llama", pp=2, dp=2, sp=2, schedule="gpipe", checkpointing=True),
]


@dataclass
class Run:
    """Results of a training run, and for each step the units that are under way when the backward passes end."""

    followed: Followed
    early: list[int]
    units: int
    bytes_agree: bool
    apart: list[str]


def ran(rt: Runtime, o: HybridOptions) -> Run:
    mesh, early, finish = o.mesh(rt), list[int](), Zero.finish

    def spied(zero: Zero) -> None:
        early.append(len(zero.leaving))
        finish(zero)

    with patch.object(Zero, "finish", spied):
        job = make_job(rt, o, mesh, OPTIMIZERS["adamw"], o.steps)
        followed = watch(job.count(train(job)), job, mesh)
    zero = job.owner
    assert isinstance(zero, Zero)
    apart = unequal_replicas(zero.named_parameters(), mesh)
    mesh.close()
    return Run(followed, early, len(zero.units) - zero.outer, job.agree, apart)


def both(rt: Runtime, cases: list[HybridOptions]) -> list[tuple[float, Run]]:
    """Return, per case: the largest difference between sums in the backward pass and after it, and the former."""
    found = []
    for o in cases:
        overlapped, afterwards = ran(rt, o), ran(rt, replace(o, overlap=False))
        assert o.zero > 1 or afterwards.early == [0] * o.steps
        found.append((worst(compare(afterwards.followed, overlapped.followed).values()).value, overlapped))
    return found


@pytest.mark.parametrize(("world", "cases"), [(4, FEW), (4, MORE), (8, MOST)], ids=["few", "more", "8"])
def test_equal_to_sums_afterwards(world: int, cases: list[HybridOptions]) -> None:
    for of_rank in spawn(both, world, cases, limit=300):
        for o, (difference, run) in zip(cases, of_rank, strict=True):
            assert difference <= 1e-12, o
            assert run.bytes_agree, o
            assert run.apart == [], o
            assert o.zero > 1 or run.early == [run.units] * o.steps, o
            assert run.units > 0, o


class Sometimes(Layer):
    """Layer with a parameter that ranks use in different micro-batches: place 0 in the last, 1 in the first."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.extra, self.passes = nn.Parameter(torch.empty(config.width)), 0

    def forward(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        micro_batch, self.passes = self.passes % 2, self.passes + 1
        y_BSD = super().forward(x_BSD, positions_S)
        return y_BSD if micro_batch == dist.get_rank() % 2 else y_BSD + self.extra


def test_parameters_that_ranks_use_at_different_times() -> None:
    """A unit leaves early on one rank and late on another; the exchange of rows to experts is not confused."""
    with patch("common.models.transformer.Layer", Sometimes):
        found = spawn(sometimes, 4)
    for difference, _ in found:
        assert difference <= 1e-12
    assert {tuple(early) for _, early in found} == {(0, 0), (2, 2)}


def sometimes(rt: Runtime) -> tuple[float, list[int]]:
    with patch("common.models.transformer.Layer", Sometimes):
        ((difference, run),) = both(rt, [case("moe", pp=2, ep=2)])
    return difference, run.early
