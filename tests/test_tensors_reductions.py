"""Reductions along any dimensions: equal to torch on one rank, with NaN, equal numbers, empty and uneven pieces."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import tensor_cases as cases
import torch
from hypothesis import strategies as st
from torch import Tensor

import common.tensors as dt
from common.comm.ledger import Ledger
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import Grid, Partial, Replicate, Shard, reductions

WORLDS = (1, 2, 3, 4, 5)
ORDERS = (0, 0.5, 1, 2, 3, math.inf, -math.inf)


def _dims(data: Any, ndim: int) -> Any:
    """Draw None, a dimension or several."""
    if not ndim:
        return None
    one = st.integers(-ndim, ndim - 1)
    several = st.lists(st.integers(0, ndim - 1), unique=True, min_size=1)
    return data.draw(st.one_of(st.none(), one, several))


def _torch(name: str, x: Tensor, dim: Any, keepdim: bool, p: float) -> Tensor:
    every = list(range(x.ndim)) if dim is None else dim
    if name == "norm":
        return torch.linalg.vector_norm(x, p, dim, keepdim)
    if name in ("max", "min"):
        return (torch.amax if name == "max" else torch.amin)(x, every, keepdim)
    return getattr(torch, name)(x, every, keepdim) if x.ndim else getattr(torch, name)(x)


def reduce(grid: Grid, data: Any) -> None:
    """Compare a reduction, and its gradient, with torch's."""
    shape = data.draw(cases.shapes())
    name = data.draw(st.sampled_from(["sum", "mean", "max", "min", "norm"]))
    dtype = data.draw(st.sampled_from(cases.FLOATS if name in ("max", "min") else cases.NUMBERS))
    dim, keepdim = _dims(data, len(shape)), data.draw(st.booleans())
    if name == "norm" and dtype.is_complex and dim is None and not shape:
        return
    p = data.draw(st.sampled_from(ORDERS))
    whole = cases.numbers(shape, dtype)
    placed = data.draw(cases.placements(grid, shape))
    whole_numbers = name in ("max", "min") and Partial() not in placed and data.draw(st.booleans())
    if whole_numbers:  # equal ones share the gradient
        whole = whole.round()
    whole.requires_grad_()
    x = cases.spread(whole.detach(), grid, placed).requires_grad_()
    arguments = (p, dim, keepdim) if name == "norm" else (dim, keepdim)
    try:
        expected = _torch(name, whole, dim, keepdim, p)
    except (RuntimeError, IndexError):  # no largest number of none
        with pytest.raises(UsageError):
            getattr(reductions, name)(x, *arguments)
        return
    found = getattr(x, name)(*arguments)
    cases.assert_close(found.full().detach(), expected.detach(), times=500)
    if name == "norm" and p in (0, 0.5):
        return  # steps, and slopes without bound
    gradient = cases.numbers(expected.shape, expected.dtype, seed=1)
    expected.backward(gradient)
    found.backward(cases.spread(gradient, grid, data.draw(cases.placements(grid, expected.shape))))
    assert x.grad is not None
    assert whole.grad is not None
    if name == "norm" and math.isinf(p) and Partial() in placed:
        return  # rounded terms differ from equal numbers
    cases.assert_close(x.grad.full(), whole.grad, times=500)


@pytest.mark.parametrize("n", WORLDS)
def test_reductions(n: int) -> None:
    cases.on_grids(n, reduce, 2 * cases.EXAMPLES)


def places(grid: Grid, data: Any) -> None:
    """Compare the place of the largest number: of equal ones the first, of NaN the first."""
    shape = data.draw(cases.shapes(least=1))
    if not math.prod(shape):
        return
    dtype = data.draw(st.sampled_from([*cases.FLOATS, torch.int64]))
    whole = (2 * cases.numbers(shape)).round().to(dtype)
    if dtype.is_floating_point and data.draw(st.booleans()):
        whole[whole == 1] = math.nan
    x = cases.spread(whole, grid, data.draw(cases.placements(grid, shape, partial=False)))
    dim = data.draw(st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1)))
    keepdim = data.draw(st.booleans())
    assert torch.equal(x.argmax(dim, keepdim).full(), torch.argmax(whole, dim, keepdim))
    every = list(range(len(shape))) if dim is None else dim
    for ours, theirs in ((x.max, torch.amax), (x.min, torch.amin)):
        found, expected = ours(dim, keepdim).full(), theirs(whole, every, keepdim)
        assert torch.equal(found.nan_to_num(99), expected.nan_to_num(99))


def with_nan(rt: Runtime) -> None:
    """A NaN on one rank is the largest, the smallest and the place on all."""
    grid = Grid(rt.world)
    whole = cases.numbers((6, 4))
    whole[5, 1] = math.nan
    x = dt.from_full(whole, grid, Shard(0))
    for found, expected in (
        (x.max(0), whole.amax(0)),
        (x.min(0), whole.amin(0)),
        (x.argmax(0), whole.argmax(0)),
    ):
        torch.testing.assert_close(found.full(), expected, equal_nan=True)


def test_nan() -> None:
    spawn(with_nan, 3)


SPECIAL = (
    *([1.0, 2.0], [2.0, 2.0, 1.0], [0.0, 3.0], [0.0, 0.0, 0.0], [-math.inf, 2.0, 3.0]),
    *([1.0, math.inf, 3.0], [math.inf, math.inf, 1.0], [math.nan], [1.0, math.nan, 3.0]),
    *([math.nan, math.nan, 3.0], [0.0, math.inf], [0.0, math.nan], [[1.0, math.nan], [2.0, 3.0], [5.0, 1.0]]),
)


def special(rt: Runtime) -> None:
    """Compare reductions of infinite, undefined and zero numbers, and their gradients, with torch."""
    grid = Grid(rt.world)
    kinds = [("max", 0.0), ("min", 0.0), ("mean", 0.0), *(("norm", p) for p in ORDERS if p)]
    for numbers, (name, p), placed in itertools.product(SPECIAL, kinds, (Replicate(), Shard(0))):
        if name == "norm" and 2 < p < math.inf and numbers == [0.0, math.nan]:
            continue  # a rank of zeros gets zeros, torch NaN
        whole = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
        x = dt.from_full(whole.detach().clone(), grid, placed).requires_grad_()
        expected = _torch(name, whole, 0, False, p)
        found = x.norm(p, 0) if name == "norm" else getattr(x, name)(0)
        torch.testing.assert_close(found.detach().full(), expected.detach(), equal_nan=True)
        expected.sum().backward()
        found.sum().backward()
        assert x.grad is not None
        assert whole.grad is not None
        same = torch.allclose(x.grad.full(), whole.grad, equal_nan=True)
        assert same, (name, p, numbers, placed, x.grad.full(), whole.grad)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_of_special_numbers(n: int) -> None:
    spawn(special, n)


def places_of_none(rt: Runtime) -> None:
    """Find the places in tensors without numbers, along dimensions that have some."""
    for placed in (Replicate(), Shard(0), Shard(1)):
        for shape, dim in (((0, 3), 1), ((3, 0), 0)):
            found = dt.full(shape, 1.0, Grid(rt.world), placed).argmax(dim)
            assert torch.equal(found.full(), torch.ones(shape).argmax(dim))


def test_places_of_none() -> None:
    spawn(places_of_none, 2)


@pytest.mark.parametrize("n", WORLDS)
def test_places(n: int) -> None:
    cases.on_grids(n, places)


def by_differences(rt: Runtime) -> None:
    """Compare gradients with finite differences, and count what is sent."""
    grid = Grid(rt.world)
    whole = cases.numbers((3, 4)).requires_grad_()
    for name, arguments in (
        ("sum", (0,)),
        ("mean", (0,)),
        ("max", (0,)),
        ("min", ()),
        ("norm", (3.0, 0)),
        ("norm", ()),
    ):

        def f(x: Tensor, name: str = name, arguments: Any = arguments) -> Tensor:
            return getattr(dt.from_full(x, grid, Shard(0)), name)(*arguments).full()

        assert torch.autograd.gradcheck(f, (whole,))
    x = dt.from_full(whole.detach(), grid, Shard(0))
    for reduced, sent in ((x.sum, 0), (x.mean, 0), (x.max, 4 * 8 + 4), (x.argmax, 2 * 4 * 8)):
        with Ledger() as ledger:
            reduced(0)
        assert ledger.bytes() == sent, reduced
    with Ledger() as ledger:
        x.max(1)
    assert ledger.bytes() == 0


def test_by_differences() -> None:
    spawn(by_differences, 2)


def tall(rt: Runtime) -> None:
    """Sum many long rows by products with ones: types, shapes, NaN, and lower precisions of products."""
    grid = Grid(rt.world)
    for shape, dims in (((600, 70), 0), ((40, 13, 65), (0, 1)), ((301, 64), 0)):
        for dtype in cases.FLOATS:
            whole = cases.numbers(shape, dtype)
            x = dt.from_full(whole, grid, Shard(0))
            assert reductions._is_tall(x.local, [0] if dims == 0 else [0, 1])
            for keepdim in (False, True):
                for name in ("sum", "mean"):
                    found = getattr(x, name)(dims, keepdim).full()
                    cases.assert_close(found, getattr(whole, name)(dims, keepdim), times=100)
    whole = cases.numbers((400, 64), torch.float32)
    whole[150, 3], whole[10, 5], whole[390, 5] = math.nan, math.inf, -math.inf
    found = dt.from_full(whole, grid, Shard(0)).sum(0).full()
    cases.assert_close(found.nan_to_num(), whole.sum(0).nan_to_num(), times=100)
    assert found.isnan().nonzero().flatten().tolist() == [3, 5]
    uneven = dt.from_full(cases.numbers((400, 64), torch.float32), grid, Shard(0, (390, 10)))
    with torch.autocast("cpu", torch.bfloat16):
        cases.assert_close(uneven.sum(0).full(), uneven.full().sum(0), times=100)
    half = dt.full((70_000, 3), 1.5, grid, Shard(0), dtype=torch.float16)
    assert half.mean(0).full().tolist() == [1.5] * 3
    for precision in ("medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        cases.assert_close(uneven.sum(0).full(), uneven.full().sum(0), times=100)


def test_tall() -> None:
    spawn(tall, 2)


def test_bad_input() -> None:
    from common.comm import Group

    grid = Grid(Group.alone())
    x = dt.full((2, 3), 1.0, grid, Replicate())
    for call, words in (
        (lambda: x.sum(2), "dimension 2 of a tensor with 2"),
        (lambda: x.sum((0, -2)), "name one twice"),
        (lambda: x.to(torch.int64).mean(), "floating-point"),
        (lambda: x.to(torch.complex64).max(), "no order"),
        (lambda: x.norm(-1.0), "positive number"),
    ):
        with pytest.raises(UsageError, match=words):
            call()
    whole = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert dt.from_full(whole, grid, Replicate()).sum().full().dtype == torch.int64
