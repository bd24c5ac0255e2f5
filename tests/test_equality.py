"""The equality check itself: what it must not let pass."""

from __future__ import annotations

import math

import torch

from common.equality import Followed, compare


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


def test_only_rounding_is_measured_on_the_models_scale() -> None:
    def two(small: float) -> Followed:
        g = {"big": torch.ones(2, dtype=torch.float64), "small": torch.full((2,), small, dtype=torch.float64)}
        return Followed([1.0], [g], [1.0], g)

    assert compare(two(1e-15), two(-1e-15))["gradients"].value < 1e-14
    assert compare(two(1e-10), two(0.0))["gradients"].value == 1.0
