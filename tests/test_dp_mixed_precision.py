"""16 bits: first gradients equal one device's with the same split; all ranks or none skip a step."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from beside_one_device import here
from mpi.launch import refused
from torch import nn

from common.comm import Group
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import KINDS, Difference

import dp_loss_scaling
import dp_mixed_precision
from dp_loss_scaling import LossScaler
from dp_precision_proof import Comparison, PrecisionOptions, Scales, ScalingOptions, formats, overflowing
from dp_training import on_one_device, on_ranks

ALONE = Group.alone()
PRECISION = PrecisionOptions(batch=9, sequence=6, steps=2)
SCALING = ScalingOptions(batch=9, sequence=6, steps=4, overflow=2)


# 9 samples: unequal parts on 2, 4 and 8 ranks
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_bfloat16(world: int) -> None:
    o = PRECISION if world in (2, 3) else replace(PRECISION, versions=("bucketed",), steps=1)
    o = replace(o, model="llama-nano") if world > 4 else o
    assert spawn(dp_mixed_precision.main, world, o) == [True] * world


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_loss_scaling(world: int) -> None:
    o = SCALING if world in (2, 3) else replace(SCALING, versions=("zero2",))
    o = replace(o, model="gpt2-nano", micro_batches=1) if world > 4 else o
    assert spawn(dp_loss_scaling.main, world, o) == [True] * world


def decisions(rt: Runtime, name: str, o: ScalingOptions) -> tuple[list[float], list[bool], list[float]]:
    """Return the scales, the overflows, and the final weights of one matrix."""
    scales: Scales = []
    train = partial(overflowing, version=dp_loss_scaling.VERSIONS[name], scales=scales)
    followed, *_ = on_ranks(rt, o, train, name, "sgd")
    factors, seen = zip(*scales, strict=True)
    return list(factors), list(seen), followed.weights["layers.1.mlp.up_proj.weight"].flatten().tolist()


@pytest.mark.parametrize("name", ["bucketed", "zero2", "ddp"])
def test_one_ranks_overflow_stops_all(name: str) -> None:
    results = spawn(decisions, 3, name, SCALING)
    for factors, _, weights in results:
        assert factors == [4096, 4096, 8192, 4096]
        assert weights == results[0][2]
        assert all(map(math.isfinite, weights))
    saw = [seen[SCALING.overflow] for _, seen, _ in results]
    assert saw == ([True, False, False] if name == "zero2" else [True] * 3)


def test_an_overflow_of_its_own_accord_finds_a_scale_that_works() -> None:
    """From a scale that is far too large, on every rank, the scaler finds one that works."""
    o = replace(SCALING, scale=2.0**30, steps=16, overflow=99, sequence=4)
    results = spawn(decisions, 2, "zero2", o)
    factors = results[0][0]
    assert factors == results[1][0]
    assert factors[1] == 2.0**29  # the first step was skipped
    assert factors[-1] > 1
    assert any(a <= b for a, b in pairwise(factors))  # and some later one was not


def step(scaler: LossScaler | torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Step unless a gradient overflowed, and set the next scale."""
    if isinstance(scaler, torch.amp.GradScaler):
        scaler.step(optimizer)
        scaler.update()
    elif scaler.unscale(optimizer):
        optimizer.step()


def test_the_scaler_takes_the_librarys_decisions() -> None:
    """Our scaler equals torch's over good steps and overflows: scales after each step, and weights."""
    good = [True, True, False, True, False, False, True, True, True, True, True]
    runs: list[tuple[list[float], list[float]]] = []
    for scaler in (LossScaler(ALONE, 1024.0, 2), torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)):
        weight = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        factors, weights = [], []
        for t, fine in enumerate(good):
            optimizer.zero_grad()
            factors.append(scaler.get_scale())
            scaler.scale((weight * (t + 1)).sum()).backward()
            assert weight.grad is not None
            if not fine:
                weight.grad[1] = math.inf if t % 2 else math.nan
            step(scaler, optimizer)
            weights.append(weight[0].item())
        runs.append((factors, weights))
    assert runs[0] == runs[1]
    assert runs[0][0] == [1024, 1024, 2048, 1024, 1024, 512, 256, 256, 512, 512, 1024]
    assert runs[0][1][:4] == [-1, -3, -3, -7]


def skip_moments(rt: Runtime) -> tuple[float, float]:
    """Return AdamW's step count and first moment after a good step and a skipped one."""
    scaler = LossScaler(rt.world, 8.0, 100)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for broken in (False, True):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        assert weight.grad is not None
        if broken and rt.rank == 1:
            weight.grad[0] = math.inf
        step(scaler, optimizer)
    state = optimizer.state[weight]
    return state["step"].item(), state["exp_avg"][0].item()


def test_a_skipped_step_leaves_the_optimizers_state_alone() -> None:
    for step, mean in spawn(skip_moments, 2):
        assert step == 1
        assert mean == pytest.approx(0.1)


def test_16_bits_are_used_and_scaling_helps() -> None:
    table = formats(here(), replace(PRECISION, sequence=32))
    columns = {column.header: list(column.cells) for column in table.columns}
    names, gradients = columns["format"], [float(cell) for cell in columns["gradients"]]
    differs, vanish = (
        dict(zip(names, gradients, strict=True)),
        dict(zip(names, columns["vanish"], strict=True)),
    )
    saved = [int(cell.replace(",", "")) for cell in columns["saved for backward"]]
    assert differs["float32"] == 0
    assert differs["bfloat16"] > 1e-3
    assert 1e-5 < differs["float16, scaled"] < differs["float16"]
    assert int(vanish["float16"]) > int(vanish["float16, scaled"])
    assert saved[1] < 0.95 * saved[0]


def test_the_weights_stay_float32() -> None:
    followed = on_one_device(here(), PRECISION, dp_mixed_precision.train_ddp, "ddp", "adamw")
    assert {g.dtype for g in followed.gradients[0].values()} == {torch.float32}
    assert {w.dtype for w in followed.weights.values()} == {torch.float32}


def test_references_overflow_where_the_ranks_do() -> None:
    assert decisions(here(), "ddp", SCALING)[1] == [False, False, True, False]


def test_a_comparison_fails_where_it_should() -> None:
    def add(found: float = 0.0, first: float = 0.0, counted: int = 5, optimizer: str = "sgd") -> list[str]:
        comparison = Comparison("test")
        differences = {kind: Difference(found if kind == "weights" else 0.0, "x") for kind in KINDS}
        comparison.add(
            "v", optimizer, torch.float16, Difference(first, "x"), differences, Fraction(counted), Fraction(5)
        )
        return comparison.wrong

    assert not add()
    assert add(found=0.02)
    assert not add(found=0.02, optimizer="adamw")
    assert add(first=2e-5)
    assert add(counted=6)


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (dp_mixed_precision.main, {"versions": ("float8",)}, "--versions 'float8' is unknown"),
        (dp_loss_scaling.main, {"overflow": 3}, "--overflow 3 --steps 4: .* --overflow 1 --steps 4 would do"),
    ],
)
def test_bad_input_is_one_line(main: Any, options: dict[str, Any], message: str) -> None:
    base: PrecisionOptions = SCALING if main is dp_loss_scaling.main else PRECISION
    assert re.search(message, refused(main, 1, replace(base, **options)))
