"""Convolutions: every split, with stride, dilation, uneven padding and groups, against torch on one rank."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import tensor_cases as cases
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import common.tensors as dt
from common.comm import Group
from common.comm.ledger import Ledger
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import DistributedTensor, Grid, Rates, Replicate, Shard, window
from common.tensors import convolution as conv
from common.tensors.cost import ways_of
from common.tensors.layout import Layout

WORLDS = (1, 2, 3, 4, 5)


def expected_of(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Return torch's convolution of an input that is padded apart, so that the two sides may differ."""
    x = F.pad(x, [n for pair in reversed(padding) for n in pair])
    function: Any = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    return function(x, w, b, stride, 0, dilation, groups)


def convolve(grid: Grid, data: Any) -> None:
    """Compare a convolution by any of its ways with torch's: result, gradients, bytes."""
    d = data.draw(st.sampled_from([1, 2, 2, 2, 3]))
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    N, C, M = (data.draw(st.integers(1, 4)), *(groups * data.draw(st.integers(1, 3)) for _ in range(2)))
    kernel = tuple(data.draw(st.integers(1, 3)) for _ in range(d))
    stride = tuple(data.draw(st.integers(1, 3)) for _ in range(d))
    dilation = tuple(data.draw(st.integers(1, 2)) for _ in range(d))
    padding = tuple((data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))) for _ in range(d))
    least = [k * q - sum(p) for k, q, p in zip(kernel, dilation, padding, strict=True)]
    spatial = tuple(data.draw(st.integers(max(1, n), max(1, n) + 6)) for n in least)
    dtype = data.draw(st.sampled_from(cases.FLOATS))
    shapes = [(N, C, *spatial), (M, C // groups, *kernel), (M,)]
    wholes = [cases.numbers(s, dtype, seed).requires_grad_() for seed, s in enumerate(shapes)]
    placed = [data.draw(cases.placements(grid, s)) for s in shapes]
    x, w, b = (
        cases.spread(t.detach(), grid, p).requires_grad_() for t, p in zip(wholes, placed, strict=True)
    )
    numbers = (stride, padding, dilation, groups)
    operation = getattr(conv, f"conv{d}d")
    ways = ways_of(operation, x, w, None, *numbers)
    way = data.draw(st.sampled_from(ways))
    with Ledger() as ledger, torch.no_grad():
        operation(x, w, None, *numbers, way=way.name)
    assert ledger.bytes() == way.cost.sent, way.name
    name = data.draw(st.sampled_from([None, way.name]))
    found = operation(x, w, b, *numbers, way=name)
    assert grid.world.size == 1 or not found.layout.partial
    cases.sampled_gradient(found, expected_of(*wholes, *numbers), data)
    cases.assert_gradients([x, w, b], wholes)
    with torch.no_grad():  # the halo travels while the interior is computed
        cases.assert_close(
            operation(x, w, None, *numbers, way=way.name).full(),
            expected_of(*wholes[:2], None, *numbers),
            500,
        )


@pytest.mark.parametrize("n", WORLDS)
def test_convolutions(n: int) -> None:
    cases.on_grids(n, convolve)


def meanwhile(rt: Runtime) -> None:
    """Compute while the halo travels, and add what it contributes, for many kernels, strides and dilations."""
    grid = Grid(rt.world)
    every = itertools.product((1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (0, 2), (1, 2, 3), (1, 2), (8, 13, 24))
    some = random.Random(rt.world_size).sample(list(every), 120)
    for kernel, stride, before, after, dilation, groups, height in some:
        if height + before + after <= dilation * (kernel - 1):
            continue
        x = dt.uniform((2, 4, height, 7), grid, Shard(2), 1, dtype=torch.float64)
        w = dt.uniform((6, 4 // groups, kernel, 3), grid, Replicate(), 2, dtype=torch.float64)
        padding = (before, after), (1, 1)
        rest = (stride, 1), padding, (dilation, 1), groups
        convolution = conv.Convolution(2, x, w, None, *rest)
        split = convolution.split(("height",))
        y = DistributedTensor(convolution.local(x.local, w.local, split, overlapped=True), split.y)
        cases.assert_close(y.full(), expected_of(x.full(), w.full(), None, *rest), 500)
    x = dt.full((1, 2, 12, 5), 1.0, grid, Shard(2))
    w = torch.zeros(3, 2, 3, 3)
    w[0, 0, 0] = math.inf  # times a zero in place of the halo it is no number
    convolution = conv.Convolution(2, x, dt.from_full(w, grid, Replicate()))
    split = convolution.split(("height",))
    y = DistributedTensor(convolution.local(x.local, w, split, overlapped=True), split.y)
    assert torch.equal(y.full().nan_to_num(7), F.conv2d(x.full(), w).nan_to_num(7))
    halves = conv.Convolution(2, x.to(torch.bfloat16), dt.from_full(w.bfloat16(), grid, Replicate()))
    assert len(window.plans_of(halves.split(("height",)), torch.bfloat16)) == 1


@pytest.mark.parametrize("n", [2, 3])
def test_meanwhile(n: int) -> None:
    spawn(meanwhile, n)


def choices(rt: Runtime) -> None:
    """Columns lie in more cache lines than rows: what is added to them counts as much; new rates, new choice."""
    grid = Grid(rt.world)
    of_weight = Layout.of(grid, (24, 16, 3, 3), Replicate())
    w = DistributedTensor(torch.zeros(of_weight.local_shape), of_weight)
    for name, dim, lines in ("height", 2, 3 * 64), ("width", 3, 34 * 64):
        x = dt.uniform((2, 16, 34, 34), grid, Shard(dim), 1)
        convolution = conv.Convolution(2, x, w, padding=1)
        split = convolution.split((name,))
        _, (_, _, border, added) = window.plans_of(split, x.dtype)
        assert (border.sizes, border.times) == ((2, 16, 24, 34, 9), 1)
        assert added.sizes == (2 * 2 * 24 * lines,)
        copies = {"copy": [(1.0, 1e-3), (1e9, 1e6)]}
        grid.rates = Rates(curves=copies, corrections={"hidden": 1.0})
        assert convolution._saves_time(split) == (name == "height")
        for start, saves in (0.3, False), (0.01, True):  # the border's convolution starts once more
            moves = {"exchange": [(1.0, 0.1), (1e9, 0.1)]}
            grid.rates = Rates(curves=moves, convolutions={"float32": (start, 0, 0, 0)})
            assert convolution._saves_time(split) == saves


def test_what_is_overlapped() -> None:
    spawn(choices, 2)


def by_height(rt: Runtime) -> None:
    """Split along H: a row to each neighbour, the result still split, and gradients by differences."""
    grid = Grid(rt.world)
    x = dt.normal((2, 3, 8, 5), grid, Shard(2), dtype=torch.float64)
    w = dt.normal((4, 3, 3, 3), grid, Replicate(), dtype=torch.float64)
    with Ledger() as ledger, torch.no_grad():
        y = conv.conv2d(x, w, padding=1, way="height")
    assert y.placements == (Shard(2),)
    assert ledger.bytes() == 2 * 3 * 5 * 8
    whole, weight = (
        cases.numbers((1, 2, 5, 3)).requires_grad_(),
        cases.numbers((2, 2, 3, 2), seed=1).requires_grad_(),
    )

    def f(x: Tensor, w: Tensor, way: str) -> Tensor:
        split = dt.from_full(x, grid, Shard(2)), dt.from_full(w, grid, Shard(0))
        return conv.conv2d(*split, None, (2, 1), ((1, 2), (0, 1)), way=way).full()

    for way in ("height", "width", "output channels", "input channels", "batch"):
        assert torch.autograd.gradcheck(lambda x, w, way=way: f(x, w, way), (whole, weight)), way


def test_by_height() -> None:
    spawn(by_height, 2)


def test_bad_input() -> None:
    grid = Grid(Group.alone())
    x, w = dt.full((1, 4, 5, 5), 1.0, grid, Replicate()), dt.full((2, 4, 3, 3), 1.0, grid, Replicate())
    for arguments, words in (
        ((w, None, 1, 0, 1, 3), "groups that divide"),
        ((w, None, 0), "stride=0: give one number or 2, at least 1"),
        ((w, None, 1, (1, -1)), "none negative"),
        ((w, None, 1, 0, 3), "the padded input is shorter than the kernel"),
        ((w, x), "the bias has"),
        ((w.to(torch.float64),), "differ"),
        ((x.sum(0),), "tensors of 4 dimensions"),
    ):
        with pytest.raises(UsageError, match=words):
            conv.conv2d(x, *arguments)  # type: ignore[arg-type]
