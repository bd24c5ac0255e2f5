"""16 bits: first gradients equal one device's with the same split; all ranks or none skip a step."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
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

from dp_loss_scaling import LossScaler, ScalingOptions, TorchScaler, alone
from dp_loss_scaling import main as scaling_main
from dp_loss_scaling import on_ranks as scaled_on_ranks
from dp_loss_scaling import prove as prove_scaling
from dp_mixed_precision import VERSIONS
from dp_mixed_precision import main as precision_main
from dp_precision_proof import Comparison, PrecisionOptions, formats, on_one_device
from dp_precision_proof import prove as prove_precision

ALONE = Group.alone()
PRECISION = PrecisionOptions(batch=9, sequence=6, steps=2)
SCALING = ScalingOptions(batch=9, sequence=6, steps=4, overflow=2)


# 9 samples: unequal parts on 2, 4 and 8 ranks
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_bfloat16(world: int) -> None:
    o = PRECISION if world in (2, 3) else replace(PRECISION, versions=("bucketed",), steps=1)
    o = replace(o, model="llama-nano") if world > 4 else o
    assert spawn(prove_precision, world, o, VERSIONS) == [True] * world


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_loss_scaling(world: int) -> None:
    o = SCALING if world in (2, 3) else replace(SCALING, versions=("zero2",))
    o = replace(o, model="gpt2-nano", micro_batches=1) if world > 4 else o
    assert spawn(prove_scaling, world, o) == [True] * world


def decisions(rt: Runtime, name: str, o: ScalingOptions) -> tuple[list[float], list[bool], list[float]]:
    """Return the scales, the overflows, and the final weights of one matrix."""
    followed, scaler = scaled_on_ranks(name, "sgd", rt, o)
    return scaler.factors, scaler.seen, followed.weights["layers.1.mlp.up_proj.weight"].flatten().tolist()


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


def test_the_scaler_takes_the_librarys_decisions() -> None:
    """Our scaler equals torch's over good steps and overflows: scales after each step, and weights."""
    good = [True, True, False, True, False, False, True, True, True, True, True]
    device = torch.device("cpu")
    runs: list[tuple[list[float], list[float]]] = []
    scalers: list[LossScaler | TorchScaler] = [LossScaler(ALONE, 1024.0, 2), TorchScaler(device, 1024.0, 2)]
    for scaler in scalers:
        weight = nn.Parameter(torch.zeros(3))
        optimizer: Any = scaler.wrap(lambda tensors: torch.optim.SGD(tensors, lr=1.0), [weight])
        weights = []
        for t, fine in enumerate(good):
            optimizer.zero_grad()
            scaler.scale((weight * (t + 1)).sum()).backward()
            assert weight.grad is not None
            if not fine:
                weight.grad[1] = math.inf if t % 2 else math.nan
            optimizer.step()
            weights.append(weight[0].item())
        runs.append((scaler.factors, weights))
    assert runs[0] == runs[1]
    assert runs[0][0] == [1024, 1024, 2048, 1024, 1024, 512, 256, 256, 512, 512, 1024]
    assert runs[0][1][:4] == [-1, -3, -3, -7]


def skip_moments(rt: Runtime) -> tuple[float, float]:
    """Return AdamW's step count and first moment after a good step and a skipped one."""
    scaler = LossScaler(rt.world, 8.0, 100)
    weight = nn.Parameter(torch.ones(2))
    optimizer = scaler.wrap(lambda tensors: torch.optim.AdamW(tensors, lr=0.1), [weight])
    for broken in (False, True):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        assert weight.grad is not None
        if broken and rt.rank == 1:
            weight.grad[0] = math.inf
        optimizer.step()
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
    followed = on_one_device(torch.bfloat16, "adamw", here(), PRECISION)
    assert {g.dtype for g in followed.gradients[0].values()} == {torch.float32}
    assert {w.dtype for w in followed.weights.values()} == {torch.float32}


def test_references_overflow_where_the_ranks_do() -> None:
    _, scaler = alone("sgd", here(), SCALING)
    assert scaler.seen == [False, False, True, False]


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
        (precision_main, {"versions": ("float8",)}, "--versions 'float8' is unknown"),
        (scaling_main, {"overflow": 3}, "--overflow 3 --steps 4: .* --overflow 1 --steps 4 would do"),
    ],
)
def test_bad_input_is_one_line(main: Any, options: dict[str, Any], message: str) -> None:
    base: PrecisionOptions = SCALING if main is scaling_main else PRECISION
    assert re.search(message, refused(main, 1, replace(base, **options)))
