"""Matrix products: every way, every pair of placements, uneven and empty pieces, against torch on one rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensor_cases as cases
import torch
from hypothesis import strategies as st
from torch import Tensor

import common.tensors as dt
from common.comm import Group
from common.comm.ledger import Ledger
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import Grid, Partial, Replicate, Shard
from common.tensors.cost import ways_of
from common.tensors.products import bmm, matmul

WORLDS = (1, 2, 3, 4, 5)


def two(grid: Grid, data: Any, shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], list[Any]]:
    """Draw operands of these shapes, in any layout; all are leaves."""
    dtype = data.draw(st.sampled_from(cases.NUMBERS))
    wholes = [cases.numbers(shape, dtype, seed).requires_grad_() for seed, shape in enumerate(shapes)]
    placed = [data.draw(cases.placements(grid, shape)) for shape in shapes]
    return wholes, [
        cases.spread(w.detach(), grid, p).requires_grad_() for w, p in zip(wholes, placed, strict=True)
    ]


def product(grid: Grid, data: Any) -> None:
    """Compare a product by any of its ways with torch's: result, gradients, bytes."""
    M, K, N = (data.draw(st.integers(0, 9)) for _ in range(3))
    wholes, (a, b) = two(grid, data, [(M, K), (K, N)])
    way = data.draw(st.sampled_from([None, *(w.name for w in ways_of(matmul, a, b))]))
    with Ledger() as ledger:
        found = matmul(a, b, way)
    if way is not None:
        [chosen] = [w for w in ways_of(matmul, a, b) if w.name == way]
        assert ledger.bytes() == chosen.cost.sent, way
    assert grid.world.size == 1 or not found.layout.partial
    cases.sampled_gradient(found, wholes[0] @ wholes[1], data)
    cases.assert_gradients([a, b], wholes)


@pytest.mark.parametrize("n", WORLDS)
def test_matmul(n: int) -> None:
    cases.on_grids(n, product)


def every_way(rt: Runtime) -> None:
    """Multiply by each way for each pair of placements; larger blocks than random ones, so that panels are many."""
    grid = Grid(rt.world, *((2, 2) if rt.world_size == 4 else (rt.world_size,)))
    wholes = [cases.numbers((10, 16)), cases.numbers((16, 6), seed=1)]
    expected, ways = wholes[0] @ wholes[1], set[str]()
    kinds = (Shard(0), Shard(1), Replicate(), Partial())
    for pair in itertools.product(kinds, kinds):
        placed = [[p, Shard(1)][: len(grid.shape)] for p in pair]
        a, b = (cases.spread(w, grid, p) for w, p in zip(wholes, placed, strict=True))
        for way in ways_of(matmul, a, b):
            cases.assert_close(matmul(a, b, way.name).full(), expected, times=200)
            ways.add(way.name)
    grids = {"summa", "cannon", "rows x columns"} if rt.world_size == 4 else {"rows", "columns", "inner"}
    panels = {"rows, b in panels", "inner, sum in panels"} if rt.world_size < 4 else set()
    assert grids | panels <= ways


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_way_of_every_pair(n: int) -> None:
    spawn(every_way, n)


def many_panels(rt: Runtime) -> None:
    """Cut into as many panels as there are rows, with links so slow that the closed form asks for it."""
    grid = Grid(rt.world)
    curves = {kind: [(1.0, 1e-9), (1e9, 1.0)] for kind in ("all-gather", "reduce-scatter")}
    grid.rates = dt.Rates(curves=curves, products={"float64": (1e-9, 1e-9, 0, 0)})
    wholes = [cases.numbers((7, 13)).requires_grad_(), cases.numbers((13, 5), seed=1).requires_grad_()]
    expected = wholes[0] @ wholes[1]
    for way, places in (("rows, b in panels", (0, 0)), ("inner, sum in panels", (1, 0))):
        spread = [cases.spread(w.detach(), grid, [Shard(d)]) for w, d in zip(wholes, places, strict=True)]
        a, b = (x.requires_grad_() for x in spread)
        [chosen] = [w for w in ways_of(matmul, a, b) if w.name == way]
        assert chosen.cost.terms[-2].times > 1
        found = matmul(a, b, way)
        cases.assert_close(found.full().detach(), expected.detach())
        found.backward(cases.spread(expected.detach(), grid, [Shard(0)]))
        for w in wholes:
            w.grad = None
        (wholes[0] @ wholes[1]).backward(expected.detach())
        cases.assert_gradients([a, b], wholes)


@pytest.mark.parametrize("n", [2, 3])
def test_many_panels(n: int) -> None:
    spawn(many_panels, n)


def batched(grid: Grid, data: Any) -> None:
    """Compare bmm, and matmul of vectors and batches, with torch's."""
    B, M, K, N = (data.draw(st.integers(0, 5)) for _ in range(4))
    batches = [[(B, M, K), (B, K, N)], [(B, M, K), (K, N)], [(2, B, M, K), (B, K, N)]]
    vectors = [[(K,), (K, N)], [(M, K), (K,)], [(K,), (K,)]]
    shapes = data.draw(st.sampled_from(batches + vectors))
    wholes, (a, b) = two(grid, data, shapes)
    if len(shapes[0]) == 3:
        way = data.draw(st.sampled_from([None, *(w.name for w in ways_of(bmm, a, b))]))
        found = bmm(a, b, way)
    else:
        found = a @ b
    cases.sampled_gradient(found, wholes[0] @ wholes[1], data)
    cases.assert_gradients([a, b], wholes)


@pytest.mark.parametrize("n", WORLDS)
def test_batches(n: int) -> None:
    cases.on_grids(n, batched)


def by_differences(rt: Runtime) -> None:
    """Compare gradients with finite differences."""
    for shape in ((2,), (2, 1)):
        grid = Grid(rt.world, *shape)
        a, b = cases.numbers((3, 4)).requires_grad_(), cases.numbers((4, 2), seed=1).requires_grad_()

        def f(a: Tensor, b: Tensor, way: str, grid: Grid = grid) -> Tensor:
            x, y = (dt.from_full(t, grid, [Shard(0), Shard(1)][-len(grid.shape) :]) for t in (a, b))
            return matmul(x, y, way).full()

        cut = [dt.from_full(t, grid, [Shard(0), Shard(1)][-len(shape) :]) for t in (a, b)]
        names = [w.name for w in ways_of(matmul, *cut)]
        for way in names:
            assert torch.autograd.gradcheck(lambda a, b, way=way: f(a, b, way), (a, b)), way


def test_by_differences() -> None:
    spawn(by_differences, 2)


def twice(rt: Runtime) -> None:
    """Compare second derivatives of every way with torch's, and ways with conjugate pieces."""
    A, B = cases.numbers((4, 6)).requires_grad_(), cases.numbers((6, 8), seed=1).requires_grad_()
    [dA] = torch.autograd.grad(((A @ B) ** 2).sum(), A, create_graph=True)
    [expected] = torch.autograd.grad((dA**2).sum(), B)
    grid = Grid(rt.world, *((2, 2) if rt.world_size == 4 else ()))
    placed = [Shard(0), Shard(1)][: len(grid.shape)]
    whole = [Replicate() for _ in placed]
    for way in [w.name for w in ways_of(matmul, *(dt.from_full(t.detach(), grid, placed) for t in (A, B)))]:
        a, b = (dt.from_full(t.detach(), grid, placed).requires_grad_() for t in (A, B))
        loss = (matmul(a, b, way) ** 2).sum().redistribute(*whole)
        [da] = torch.autograd.grad(loss.local, a.local, create_graph=True)
        again = (dt.DistributedTensor(da, a.layout) ** 2).sum().redistribute(*whole)
        [found] = torch.autograd.grad(again.local, b.local)
        cases.assert_close(dt.DistributedTensor(found, b.layout).full(), expected, times=1000)
        z = dt.from_full(torch.complex(A.detach(), A.detach() + 1), grid, placed)
        conjugate = dt.pointwise("conj", torch.conj, z)
        cases.assert_close(matmul(conjugate, z.T, way).full(), conjugate.full() @ z.full().T, times=200)


@pytest.mark.parametrize("n", [2, 4])
def test_second_derivatives(n: int) -> None:
    spawn(twice, n)


def test_bad_input() -> None:
    grid = Grid(Group.alone())
    a, b = dt.full((2, 3), 1.0, grid, Replicate()), dt.full((4, 2), 1.0, grid, Replicate())
    with pytest.raises(UsageError, match=r"\[2, 3\] and \[4, 2\] do not match"):
        matmul(a, b)
    with pytest.raises(UsageError, match="no way 'diagonal'; there are 'rows', 'columns', 'inner'"):
        matmul(a, a.T, "diagonal")
    with pytest.raises(UsageError, match="do not match"):
        bmm(a, b)
    for wrong in (lambda: a @ torch.ones(3, 2), lambda: a + torch.ones(2, 3), lambda: np.ones(3) * a):
        with pytest.raises(UsageError, match="makes a distributed tensor of it"):
            wrong()
    with pytest.raises(UsageError, match="different Grid objects"):
        matmul(a, dt.full((3, 2), 1.0, Grid(Group.alone()), Replicate()))
    grid.rates = dt.Rates(memory=10)
    with pytest.raises(UsageError, match="needs least, 16"):
        matmul(a, a.T)
    x = dt.full((2, 2, 2), 1.0, grid, Replicate())
    image, weight = (dt.full((1, 1, n, n), 1.0, grid, Replicate()) for n in (4, 2))
    for operation in (
        lambda: bmm(x, x),
        lambda: dt.einsum("abc,cd->abd", x, dt.full((2, 2), 1.0, grid, Replicate())),
        lambda: dt.conv2d(image, weight),
    ):
        with pytest.raises(UsageError, match="every way needs more memory"):
            operation()
