"""What operations cost: rates, choices, explanations, chunks and balance."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import common.tensors as dt
from common.comm import Group
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import Grid, Rates, Replicate, Shard
from common.tensors.balance import Balancer, measure_speeds, proportional
from common.tensors.calibrate import calibrate
from common.tensors.cost import Cost
from common.tensors.explain import explain
from common.tensors.overlap import best_chunks, estimate_overlap_benefit, seconds
from common.tensors.products import matmul
from common.tensors.rates import Term, largest_prime, transform_curve
from common.tensors.trials import fitted_corrections

ROOT = Path(__file__).resolve().parents[1]


def test_rates_by_hand(tmp_path: Path) -> None:
    rates = Rates(1e9, {"float32": (1, 2, 3, 4)}, {}, {"copy": [(10.0, 1.0), (1000.0, 10.0)]})
    product = Term("product", (1, 2, 3, 5))
    assert rates.seconds(product) == 1 + 2 * 2 * 30 + 3 * 4 * (6 + 15) + 4 * 4 * 10
    assert rates.seconds(Term("copy", (100,))) == pytest.approx(math.sqrt(10))
    assert rates.seconds(Term("copy", (10_000,), times=3)) == pytest.approx(300)
    moved = Term("copy", (10,), hidden=True)
    assert rates.predict([product, moved]) == rates.seconds(product)
    rates.save(tmp_path / "machine.json")
    loaded = Rates.load(tmp_path / "machine.json")
    assert loaded.seconds(product) == rates.seconds(product)
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "old.json").write_text((tmp_path / "machine.json").read_text().replace("4\n", "4, 5\n"))
    (tmp_path / "kinds.json").write_text('{"memory": null, "products": 3}')
    for bad, words in (
        ("bad.json", "not the rates of a machine"),
        ("old.json", "calibrate again"),
        ("kinds.json", "not the rates of a machine"),
        ("absent.json", "No such file"),
    ):
        with pytest.raises(UsageError, match=words):
            Rates.load(tmp_path / bad)


def test_a_machine_of_the_planner() -> None:
    rates = Rates.load(ROOT / "06-hybrid-parallelism" / "planner" / "machines" / "a100-80gb.toml")
    n = 8192
    took = rates.seconds(Term("product", (1, n, n, n), torch.bfloat16))
    assert 2 * n**3 / 312e12 < took < 2 * n**3 / 100e12
    assert rates.memory > 40e9


def explained(rt: Runtime) -> None:
    """Choose by rates under which one way is the cheapest by far, and measure all ways."""
    grid = Grid(rt.world)
    a, b = dt.uniform((64, 32), grid, Shard(0)), dt.uniform((32, 16), grid, Shard(0))
    found = explain(matmul, a, b, measure=3)
    names = {c.way.name for c in found.candidates}
    assert {"rows", "columns", "inner"} <= names
    assert found.chosen == min(found.candidates, key=lambda c: c.predicted).way.name
    assert all(c.measured is not None and c.measured > 0 for c in found.candidates)
    assert found.regret >= 0
    assert f"{found.chosen} *" in str(found)
    dear = [(1.0, 100.0), (1e9, 100.0)]
    grid.rates = Rates(curves={"all-gather": dear, "exchange": dear})
    assert explain(matmul, a.redistribute(Shard(1)), b).chosen == "inner, sum in panels"
    least = min(c.way.cost.memory for c in found.candidates)
    grid.rates = Rates(memory=least)
    assert matmul(a, b).shape == (64, 16)
    grid.rates = Rates(memory=least - 1)
    with pytest.raises(UsageError, match=f"needs least, {least:,}"):
        matmul(a, b)


def test_explain() -> None:
    spawn(explained, 2)


def as_called(rt: Runtime) -> None:
    """Explain calls whose ways depend on a gradient, or on a way that is given by position."""
    grid = Grid(rt.world)
    a = dt.uniform((8, 8), grid, Shard(0))
    assert explain(matmul, a, a, "inner").chosen == "inner"
    with pytest.raises(UsageError, match="'rows' was not measured"):
        _ = explain(matmul, a, a, way="rows").regret
    z = dt.normal((16, 16), grid, Shard(0), dtype=torch.complex64)
    x, w = dt.uniform((2, 4, 16, 16), grid, Shard(2)), dt.uniform((4, 4, 3, 3), grid, Replicate())

    def offered() -> tuple[bool, bool]:
        transforms, convolutions = explain(dt.fft2, z, measure=1), explain(dt.conv2d, x, w, way="height")
        dt.fft2(z, way=transforms.chosen)
        [height] = [c.way for c in convolutions.candidates if c.way.name == "height"]
        names = {c.way.name for c in transforms.candidates}
        return "transposing" in names, any(term.hidden for term in height.cost.terms)

    grid.rates = Rates(curves={"exchange": [(1.0, 1e-3), (1e9, 1e-3)]})  # so slow that overlap pays
    assert offered() == (True, True)
    for tensor in (z, x):
        tensor.requires_grad_()
    assert offered() == (False, False)
    with torch.no_grad():
        assert offered() == (True, True)


def test_explain_shows_the_ways_of_the_call() -> None:
    spawn(as_called, 2)


def calibrated(rt: Runtime) -> list[float]:
    """Measure this machine in short."""
    rates = calibrate(Grid(rt.world), seconds=0.0, largest=1 << 20, trials=1)
    assert {transform_curve(torch.complex64, banded) for banded in (False, True)} <= set(rates.curves)
    terms = [Term("product", (1, n, n, n)) for n in (32, 256)] + [
        Term("exchange", (n, 1)) for n in (10**3, 10**6)
    ]
    return [rates.seconds(t) for t in terms]


def test_calibrate() -> None:
    one, other = spawn(calibrated, 2)
    assert one == other
    assert all(0 < seconds < math.inf for seconds in one)


@given(
    st.integers(0, 10**6),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
)
def test_lengths_in_proportion(total: int, rates: list[float]) -> None:
    sizes = proportional(total, rates)
    assert sum(sizes) == total
    assert all(abs(n - total * r / sum(rates)) < 1 + 1e-6 * total for n, r in zip(sizes, rates, strict=True))


def test_balancer_follows_a_slower_rank_and_ignores_noise() -> None:
    balancer = Balancer(1200, 3)
    assert balancer.sizes == (400, 400, 400)
    assert not balancer.observe([4.0, 4.1, 3.9])
    for _ in range(6):  # rank 1 at half speed from here
        balancer.observe([n * (0.02 if i == 1 else 0.01) for i, n in enumerate(balancer.sizes)])
    assert balancer.sizes == pytest.approx((480, 240, 480), abs=12)
    best = 1200 * 0.01 / 2.5
    assert best / max(n * (0.02 if i == 1 else 0.01) for i, n in enumerate(balancer.sizes)) >= 0.9
    assert Balancer(10, [1.0, 1e-9]).sizes == (10, 0)
    for bad in ([0.0, 1.0], [], [math.nan]):
        with pytest.raises(UsageError):
            proportional(3, bad)
    with pytest.raises(UsageError):
        Balancer(3, 2, memory=1.0)


def speeds(rt: Runtime) -> list[float]:
    """Measure how often each rank does some work in a second."""
    x = torch.ones(64, 64)
    return measure_speeds(Grid(rt.world), lambda: x @ x)


def test_speeds_are_known_to_all() -> None:
    one, other = spawn(speeds, 2)
    assert one == other
    assert min(one) > 0


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1e-6, 1))
def test_closed_form_of_chunks(compute: float, communication: float, overhead: float) -> None:
    best = best_chunks(compute, communication, overhead)
    shortest = min(seconds(n, compute, communication, overhead) for n in range(1, 65))
    assert seconds(best, compute, communication, overhead) == pytest.approx(shortest)
    assert 1 <= estimate_overlap_benefit(compute, communication, overhead) < 2


def test_chunks_by_hand() -> None:
    assert best_chunks(1.0, 0.25, 0.01) == 5
    assert seconds(5, 1.0, 0.25, 0.01) == pytest.approx(1.1)
    assert best_chunks(1.0, 1.0, 0.0, most=7) == 7
    for bad in ((-1, 0, 0), (0, 0, -1)):
        with pytest.raises(UsageError):
            best_chunks(*bad)


def test_alone_without_a_launcher() -> None:
    grid = Grid(Group.alone())
    x = dt.uniform((5, 4), grid, Replicate())
    assert torch.equal((x @ x.T).full(), x.full() @ x.full().T)


def test_the_largest_prime_factor() -> None:
    assert [largest_prime(n) for n in (1, 2, 8, 12, 17, 1210, 1952, 2003)] == [2, 2, 2, 3, 17, 11, 61, 2003]


@pytest.mark.parametrize("rate", [None, 1e-10, 1e-8])
def test_transforms_in_bands_that_were_not_measured_take_as_long_as_others(rate: float | None) -> None:
    """Rates by default, and those of a file without that curve."""
    whole = Term("transform", (64, 96, 1), torch.complex64)
    banded = replace(whole, banded=True)
    curves = {} if rate is None else {transform_curve(torch.complex64): [(8.0, rate), (4096.0, rate)]}
    rates = Rates(curves=curves)
    assert rates.seconds(whole) == rates.seconds(banded)
    measured = Rates(curves=curves | {transform_curve(torch.complex64, banded=True): [(8.0, 1e-12)]})
    assert measured.seconds(banded) < measured.seconds(whole)


def test_corrections_count() -> None:
    terms = (Term("product", (1, 4, 4, 4)), Term("exchange", (64, 1), times=3))
    alone = Rates().predict(terms)
    assert Rates(corrections={"way product": 1.0}).predict(terms) == pytest.approx(1 + alone)
    assert Rates(corrections={"move": 1.0}).predict(terms) == pytest.approx(3 + alone)
    twice = Rates(corrections={"product": 2.0, "exchange": 2.0}).predict(terms)
    assert twice == pytest.approx(2 * alone)


def test_corrections_explain_the_times() -> None:
    """Times that are made of terms by known factors give these factors back, but for times that others disturbed."""
    rates = Rates(curves={"exchange": [(1.0, 1e-6), (1e9, 1.0)]})
    true = replace(rates, corrections={"move": 3e-4, "way product": 1e-4, "exchange": 2.5, "product": 1.25})
    sizes = [(10**a, 4**b) for a in range(2, 8) for b in range(2, 6)]
    costs = [Cost((Term("exchange", (n, 1)), Term("product", (1, m, m, m))), 0) for n, m in sizes] + [
        Cost((Term("product", (1, m, m, m)),), 0) for m in (32, 64, 256, 1024)
    ]
    times = [true.predict(c.terms) * (3 if i == 5 else 1) for i, c in enumerate(costs)]
    found = fitted_corrections(rates, costs, times)
    for name, value in true.corrections.items():
        assert found[name] == pytest.approx(value, rel=0.05), name
