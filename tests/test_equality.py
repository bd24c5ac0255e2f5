"""The equality check itself: mistakes that it must find."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import cast

import pytest
import torch
from steps import Version, follow, training_step
from torch import Tensor

from common.comm import Group
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import (
    OPTIMIZERS,
    TOLERANCE,
    ULPS,
    Followed,
    Start,
    compare,
    in_ulps,
    largest,
    moved,
    unmoved,
    watch,
    with_units,
    worst,
    worst_of_world,
)
from common.lesson.job import Job
from common.lesson.measure import BenchmarkRecord
from common.lesson.proof import Proof
from common.lesson.training import Batches, make_model

import dp_basic
import pp_1f1b
import tp_megatron
from dp_training import DataParallelOptions
from pp_training import PipelineOptions
from tp_megatron import MegatronOptions


def run(gradient: list[float], weight: list[float], loss: float = 1.0) -> Followed:
    g, w = torch.tensor(gradient, dtype=torch.float64), torch.tensor(weight, dtype=torch.float64)
    return Followed([loss], [{"w": g}], [g.norm().item()], {"w": w})


def test_equal_runs_differ_by_nothing() -> None:
    found = compare(run([1, 2], [3, 4]), run([1, 2], [3, 4]))
    assert all(d.value == 0 for d in found.values())


def test_differences_are_relative_and_named() -> None:
    found = compare(run([1, 2], [3, 4]), run([1, 2.2], [3, 4]))
    assert math.isclose(found["gradients"].value, 0.1)
    assert found["gradients"].where == "w, step 0"


def test_a_difference_from_zeros_is_infinite() -> None:
    found = compare(run([0, 0], [3, 4]), run([0, 1e-13], [3, 4]))
    assert found["gradients"].value == math.inf
    assert found["gradient norm"].value == math.inf
    assert compare(run([0, 0], [3, 4]), run([0, 0], [3, 4]))["gradients"].value == 0


def test_what_is_not_a_number_never_passes() -> None:
    good, nan = run([1, 2], [3, 4]), run([1, math.nan], [3, math.inf], math.nan)
    for a, b in ((good, nan), (nan, good), (nan, nan)):
        found = compare(a, b)
        assert found["gradients"].value == math.inf
        assert found["loss"].value == math.inf
        assert found["weights"].value == math.inf


def test_missing_and_extra_names_and_steps_never_pass() -> None:
    good, empty = run([1, 2], [3, 4]), Followed([1.0], [{}], [1.0], {})
    for a, b in ((good, empty), (empty, good), (empty, empty)):
        assert compare(a, b)["gradients"].value == math.inf
        assert compare(a, b)["weights"].value == math.inf
    assert compare(good, Followed())["loss"].value == math.inf
    assert compare(run([1, 2], [3, 4]), run([1, 2, 3], [3, 4]))["gradients"].value == math.inf


def test_a_small_tensor_is_measured_by_its_share_of_the_largest_without_a_jump() -> None:
    share = 4 * 2.0**-52 / 1e-12
    for size in (1.0, 2 * share, share, share / 2, 64 * 2.0**-52, 1e-14, 0.0):
        a = {
            "large": torch.ones(2, dtype=torch.float64),
            "small": torch.full((2,), size, dtype=torch.float64),
        }
        b = {"large": a["large"], "small": a["small"] - 1e-15}
        apart = (a["small"] - b["small"]).max().item()
        assert math.isclose(largest(a, b).value, apart / max(size, share)), size
    rounding = 4 * 2.0**-52  # the tolerance, relative to the largest element
    for factor in (0.99, 1.01):
        apart = {**a, "small": a["small"] + factor * rounding}
        assert (largest(a, apart).value <= TOLERANCE[torch.float64]) == (factor < 1)


class Weights(torch.nn.Module):
    """Model in which the gradient of `small` is 1e-8 times the weight `large`, and that of `zero` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.linspace(1, 2, 8, dtype=torch.float64))
        self.small = torch.nn.Parameter(torch.linspace(1, 2, 8, dtype=torch.float64))
        self.zero = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self) -> Tensor:
        return (self.large * self.large + 1e-8 * self.small * self.large.detach() + 0 * self.zero).sum()


def weights_followed(start: Start, mistake: Callable[[Weights], object] = lambda model: None) -> Followed:
    model = start(Weights())

    def step(_: int) -> Tensor:
        loss: Tensor = model()
        loss.backward()
        mistake(model)
        return loss.detach()

    return follow(model, "sgd", 3, step)


def test_units_see_what_hides_in_a_small_tensor() -> None:
    reference = with_units(weights_followed)
    assert reference.units is not None
    assert in_ulps(reference, weights_followed(unmoved)).value == 0
    assert in_ulps(reference, weights_followed(moved)).value <= 1

    def wrong(model: Weights) -> None:
        assert model.small.grad is not None
        model.small.grad *= 1 + 1e-10

    found = weights_followed(unmoved, wrong)
    assert compare(reference, found)["gradients"].value < TOLERANCE[torch.float64]
    ulps = in_ulps(reference, found)
    assert (ulps.value > ULPS, ulps.where.split(",")[0]) == (True, "small")


def test_a_loss_rounds_as_the_weights_do() -> None:
    """A loss that is off by one unit in the last place counts as 1 unit, even if its measured unit is 0."""
    eps = torch.finfo(torch.float32).eps
    still: list[dict[str, float]] = [{"loss, step 0": 0.0}, {"norm, step 0": 0.0}, {"w": 0.0}]
    reference, other = (
        Followed(losses=[loss], norms=[1.0], weights={"w": torch.ones(2)}, units=still)
        for loss in (1.0, 1 + eps)
    )
    assert in_ulps(reference, other).value == 1


def test_units_of_what_is_missing_or_no_number_never_pass() -> None:
    reference = with_units(weights_followed)
    for change in ({"small": None}, {"small": math.nan}):
        other = weights_followed(unmoved)
        for name, value in change.items():
            if value is None:
                del other.weights[name]
            else:
                other.weights[name][0] = value
        assert in_ulps(reference, other).value == math.inf
    assert in_ulps(weights_followed(unmoved), reference).value == math.inf  # a run without units


# Records of a lesson


def two_versions(
    rt: Runtime,
) -> tuple[list[tuple[str, bool | None, float | None, dict[str, float] | None]], str]:
    """Return the results and closing sentence for a right version, a wrong one, and one without a row."""
    proof = Proof(Mesh(rt.world, dp=1), torch.float64)
    reference = with_units(weights_followed)

    def off(model: Weights) -> None:
        model.large.grad = cast(Tensor, model.large.grad) * (1 + 1e-9)

    for version, mistake in (("right", lambda model: None), ("off", off)):
        for optimizer in OPTIMIZERS:
            proof.add(version, optimizer, reference, weights_followed(unmoved, mistake), None, Fraction(0))
    records = [
        BenchmarkRecord(*(["dp", name, "pytorch"] + [None] * 13)) for name in ("right", "off", "other")
    ]  # type: ignore[arg-type]
    found = proof.recorded(records)
    return [(r.implementation, r.equal, r.largest_difference, r.differences) for r in found], proof.sentence()


def test_each_version_has_a_difference_and_a_verdict_of_its_own() -> None:
    ((right, off, other), sentence), *_ = spawn(two_versions, 1)
    assert right == ("right", True, 0.0, {"sgd": 0.0, "adamw": 0.0})
    assert off[1] is False
    assert off[2] == pytest.approx(1e-9, rel=0.1)
    assert off[3] == pytest.approx({"sgd": off[2], "adamw": off[2]})
    assert other == ("other", None, None, None)
    assert "NOT equal to one device: loss, step 2" in sentence


# The margin between the largest honest difference and the smallest mistake


def single(model: torch.nn.Module) -> None:
    """Round the gradient of the first query projection to float32, as a message in float32 would."""
    for name, p in model.named_parameters():
        if name.endswith("q_proj.weight") and p.grad is not None:
            p.grad.copy_(p.grad.float())
            return


def whole_added(model: torch.nn.Module) -> None:
    """Add 1e-11 of each gradient to it."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= 1 + 1e-11


SAMPLE = (("gpt2-tiny", "dp"), ("llama-tiny", "dp"), ("llama-tiny", "tp"), ("gpt2-deep", "pp"))
MISTAKES: dict[str, Callable[[torch.nn.Module], object]] = {
    "honest": lambda model: None,
    "a message in float32": single,
    "1e-11 of the whole added": whole_added,
}


Case = tuple[str, str, str, str, float, float]
"""Mistake, model, axis, optimizer, largest relative difference, and largest difference in units."""


def measured_of(rt: Runtime, name: str, axis: str, optimizer: str) -> list[Case]:
    """Train with each mistake, and without one; return the cases."""
    options, kind, train = {
        "dp": (DataParallelOptions, "bucketed", dp_basic.LESSON.versions["bucketed"]),
        "tp": (MegatronOptions, "plain", tp_megatron.train),
        "pp": (PipelineOptions, "1f1b", partial(pp_1f1b.train, kind=pp_1f1b.ONE_F_ONE_B)),
    }[axis]
    o = options(model=name, steps=6, batch=4, sequence=16, micro_batches=2)  # type: ignore[operator]
    mesh, alone = Mesh(rt.world, **{axis: rt.world_size}), Group.alone()

    def one_device(start: Start) -> Followed:
        model = start(make_model(o, rt.device))
        whole = Batches(replace(o, micro_batches=1), alone, rt.device)
        return follow(model, optimizer, o.steps, training_step(Version(model), whole, alone))

    def on_ranks(spoil: Callable[[torch.nn.Module], object]) -> Followed:
        model = make_model(o, rt.device)

        def spoiled(tensors: list[Tensor]) -> torch.optim.Optimizer:
            made = OPTIMIZERS[optimizer](tensors)
            made.register_step_pre_hook(lambda *_: spoil(model))
            return made

        job = Job(rt, o, kind, model, mesh, axis, spoiled, o.steps)
        return watch(train(job), job, mesh)

    reference, found = with_units(one_device), []
    for mistake, spoil in MISTAKES.items():
        run = on_ranks(spoil)
        differences = worst_of_world(compare(reference, run) | {"ulps": in_ulps(reference, run)}, mesh)
        ulps = differences.pop("ulps").value
        found.append((mistake, name, axis, optimizer, worst(differences.values()).value, ulps))
    return found


def measured(rt: Runtime) -> list[Case]:
    """Return the cases of the whole sample."""
    cases = itertools.product(SAMPLE, OPTIMIZERS)
    return [row for (name, axis), optimizer in cases for row in measured_of(rt, name, axis, optimizer)]


def test_the_margin_between_rounding_and_the_smallest_mistake() -> None:
    rows, _ = spawn(measured, 2)
    for row in rows:
        print("{:25} {:10} {} {:5} {:.1e} {:8.1f}".format(*row))
    honest = [row for row in rows if row[0] == "honest"]
    assert max(row[4] for row in honest) < TOLERANCE[torch.float64] / 10
    assert max(row[5] for row in honest) < ULPS / 3
    for row in rows:
        if row[0] != "honest":
            assert row[4] > 3 * TOLERANCE[torch.float64] or row[5] > 3 * ULPS, row
