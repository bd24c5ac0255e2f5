"""Distributed tensors: how they are made, elementwise operations and their gradients, bad input on some ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensor_cases as cases
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor import distribute_tensor

import common.tensors as dt
from common import random as by_position
from common.comm import Group
from common.comm.ledger import Ledger
from common.errors import RankError, UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import Grid, Partial, Replicate, Shard
from common.tensors.calibrate import calibrate

WORLDS = (1, 2, 3, 4, 5)


def made(grid: Grid, data: Any) -> None:
    """Compare tensors of which every rank makes its piece with those that one rank makes."""
    shape = data.draw(cases.shapes())
    placed = data.draw(cases.placements(grid, shape, partial=False))
    seed = data.draw(st.integers(0, 2**63 - 1))
    alone = Grid(Group.alone())
    for make in (dt.uniform, dt.normal):
        for dtype in (torch.float64, torch.float32, torch.complex64):
            found = make(shape, grid, placed, seed, dtype)
            assert found.dtype == dtype
            assert torch.equal(found.full(), make(shape, alone, Replicate(), seed, dtype).local)
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    strides = index.stride()

    def position(*at: Tensor) -> Tensor:
        return sum((i * s for i, s in zip(at, strides, strict=True)), torch.zeros(())).to(torch.float64)

    assert torch.equal(dt.from_function(position, shape, grid, placed).full(), index)
    root = data.draw(st.integers(0, grid.world.size - 1))
    with Ledger() as ledger:
        spread = dt.from_root(index if grid.world.rank == root else None, grid, placed, root)
    assert grid.world.rank == root or ledger.bytes() == 0
    assert torch.equal(spread.full(), index)
    assert torch.equal(dt.full(shape, 2.5, grid, placed, torch.float64).full(), 0 * index + 2.5)


@pytest.mark.parametrize("n", WORLDS)
def test_made_in_parallel(n: int) -> None:
    cases.on_grids(n, made)


@pytest.mark.parametrize("shape", [(), (70_000,), (3, 40_000), (40_000, 3), (0, 5)])
def test_random_numbers_of_large_tensors(shape: tuple[int, ...]) -> None:
    index = np.arange(math.prod(shape)).reshape(shape)
    grid = Grid(Group.alone())
    for make, numbers in ((dt.uniform, by_position.uniform), (dt.normal, by_position.normal)):
        real, imaginary = (torch.from_numpy(numbers(3, k, index)).view(shape) for k in (0, 1))
        assert torch.equal(make(shape, grid, Replicate(), 3, torch.float64).local, real)
        found = make(shape, grid, Replicate(), 3, torch.complex128).local
        assert torch.equal(found, torch.complex(real, imaginary))


def test_arrays_in_any_order() -> None:
    grid, a = Grid(Group.alone()), np.arange(12.0).reshape(3, 4)
    for array in (a, a[::-1], a[:, ::-2], a.T, a.astype(">f8"), np.array(2.0)):
        for make in (dt.from_root, dt.from_full):
            assert np.array_equal(make(array, grid, Replicate()).local.numpy(), array)
    with pytest.raises(UsageError, match="an array of <U3: torch makes no tensor of it"):
        dt.from_full(np.array(["one", "two"]), grid, Replicate())


def elementwise(grid: Grid, data: Any) -> None:
    """Compare an operation on broadcast operands, and the gradients, with torch on whole tensors."""
    longest = data.draw(cases.shapes())
    dtype = data.draw(st.sampled_from(cases.NUMBERS))
    name = data.draw(st.sampled_from(["add", "sub", "mul", "truediv"]))
    operation: Callable[[Any, Any], Any] = getattr(operator, name)
    wholes, tensors = [], []
    for seed in range(2):
        cut = data.draw(st.integers(0, len(longest)))
        shape = tuple(
            1 if data.draw(st.booleans()) and data.draw(st.booleans()) else n for n in longest[cut:]
        )
        whole = cases.numbers(shape, dtype, seed) + (3 if name == "truediv" else 0)
        wholes.append(whole.requires_grad_())
        placed = data.draw(cases.placements(grid, shape))
        tensors.append(cases.spread(whole.detach(), grid, placed).requires_grad_())
    expected, found = operation(*wholes), operation(*tensors)
    cases.assert_close(found.full().detach(), expected.detach())
    gradient = cases.numbers(expected.shape, dtype, seed=2)
    expected.backward(gradient)
    found.backward(cases.spread(gradient, grid, data.draw(cases.placements(grid, expected.shape))))
    for x, whole in zip(tensors, wholes, strict=True):
        assert x.grad is not None
        assert whole.grad is not None
        cases.assert_close(x.grad.full(), whole.grad, times=500)


@pytest.mark.parametrize("n", WORLDS)
def test_elementwise(n: int) -> None:
    cases.on_grids(n, elementwise)


def views_and_scalars(rt: Runtime) -> None:
    """Compare what keeps the pieces in place, or takes a number, with torch."""
    grid = Grid(rt.world)
    whole = cases.numbers((3, 5, 2))
    for placed in (Shard(0), Shard(1), Shard(2), Replicate(), Partial()):
        x = cases.spread(whole, grid, [placed])
        with Ledger() as ledger:
            swapped, turned = x.transpose(0, -1), x.permute(1, 2, 0)
        assert ledger.bytes() == 0
        cases.assert_close(swapped.full(), whole.transpose(0, -1))
        cases.assert_close(turned.full(), whole.permute(1, 2, 0))
        cases.assert_close((2 - x).full(), 2 - whole)
        cases.assert_close((1 / (abs(x) + 1)).full(), 1 / (whole.abs() + 1))
        cases.assert_close((3 * x + 1 - x / 4).full(), 3 * whole + 1 - whole / 4)
        cases.assert_close(((-x) ** 2).full(), whole**2)
        cases.assert_close((2**x).full(), 2**whole)
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            compare: Callable[[Any, Any], Any] = getattr(operator, name)
            assert torch.equal(compare(x, whole[0, 0, 0].item()).full(), compare(whole, whole[0, 0, 0]))
        assert x.to(torch.float32).full().dtype == torch.float32
        assert f"[3, 5, 2], float64, {dt.layout.show(x.placements)}" in repr(x)
        assert torch.equal(x.clone().detach().local, x.local)


@pytest.mark.parametrize("n", [1, 3])
def test_views_and_scalars(n: int) -> None:
    spawn(views_and_scalars, n)


def checked_by_differences(rt: Runtime) -> None:
    """Compare gradients with finite differences, and gradients of gradients: all ranks change the same number."""
    for shape in ((2,), (1, 2), (2, 1)):
        grid = Grid(rt.world, *shape)
        a, b = (cases.numbers((3, 2), seed=s).requires_grad_() for s in (0, 1))

        def f(a: Tensor, b: Tensor, grid: Grid = grid) -> Tensor:
            ways = [Shard(0), Replicate()][: len(grid.shape)]
            x = dt.from_full(a, grid, ways)
            y = dt.from_full(b, grid, [Replicate(), Shard(1)][-len(grid.shape) :])
            return (x * y + y / (x * x + 2)).full()

        assert torch.autograd.gradcheck(f, (a, b))
        assert torch.autograd.gradgradcheck(f, (a, b))


def test_gradients_by_differences() -> None:
    spawn(checked_by_differences, 2)


def from_files(rt: Runtime, folder: Path) -> None:
    """Read files by pieces."""
    grid = Grid(rt.world)
    whole = cases.numbers((7, 3))
    for placed in (Shard(0), Shard(1), Shard(0, (7,) + (0,) * (rt.world_size - 1)), Replicate()):
        for name in ("x.npy", "big-endian.npy"):
            assert torch.equal(dt.load(folder / name, grid, placed).full(), whole)
        assert torch.equal(dt.load(folder / "x.safetensors", grid, placed, "x").full(), whole)
        assert dt.load(folder / "x.npy", grid, placed, device="meta").device.type == "meta"


@pytest.mark.parametrize("n", [1, 2, 4])
def test_files(n: int, tmp_path: Path) -> None:
    whole = cases.numbers((7, 3))
    np.save(tmp_path / "x.npy", whole.numpy())
    np.save(tmp_path / "big-endian.npy", whole.numpy().astype(">f8"))
    save_file({"x": whole}, tmp_path / "x.safetensors")
    spawn(from_files, n, tmp_path)


def with_dtensor(rt: Runtime) -> None:
    """Turn tensors into DTensors of torch and back; DTensor's own full_tensor must agree."""
    for shape in cases.GRIDS[rt.world_size]:
        grid = Grid(rt.world, *shape)
        mesh = init_device_mesh("cpu", shape)
        for size in ((8, 4), (5, 3), (1, 7)):
            whole = cases.numbers(size)
            every = (
                [Shard(0), Replicate(), Shard(1)],
                [Shard(1), Shard(0), Replicate()],
                [Partial(), Shard(1), Partial()],
            )
            for placed in every:
                x = cases.spread(whole, grid, placed[: len(shape)])
                theirs = dt.to_dtensor(x, mesh)
                cases.assert_close(theirs.full_tensor(), whole)
                cases.assert_close(dt.from_dtensor(theirs, grid).full(), whole)
        if len(shape) == 2:  # both axes cut one dimension
            whole, both = cases.numbers((12, 2)), [Shard(0), Shard(0)]
            theirs = dt.to_dtensor(cases.spread(whole, grid, both), mesh)
            cases.assert_close(theirs.full_tensor(), whole)
            cases.assert_close(dt.from_dtensor(theirs, grid).full(), whole)
            with pytest.raises(UsageError, match="unevenly"):
                dt.to_dtensor(cases.spread(cases.numbers((13, 2)), grid, both), mesh)
            with pytest.raises(UsageError, match="unevenly"):
                dt.from_dtensor(distribute_tensor(cases.numbers((13, 2)), mesh, [Split(0), Split(0)]), grid)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_dtensor(n: int) -> None:
    spawn(with_dtensor, n)


@dataclass
class Given:
    """Inputs of a wrong call: this rank, the group, a tensor [4, 6] that is split by rows, and a folder."""

    rank: int
    world: Group
    x: Any
    folder: Path

    @property
    def grid(self) -> Grid:
        return self.x.grid


def not_called_by_all(given: Given) -> None:
    if given.rank == 0:
        _ = given.x + 1
    given.x.full()


def made_by_one(given: Given) -> None:
    if given.rank == 0:
        dt.from_function(lambda i: i, (4,), given.grid, Replicate())
    given.x.full()


def other_rates(given: Given) -> None:
    given.grid.rates = dt.Rates(memory=1e9 + given.rank)
    given.x.full()


NO_ARRAY, DIFFER = "not a number, a list or an array", "all ranks must call the same operations"
BEFORE = "what they called before differs"
WRONG: dict[str, tuple[Callable[[Given], object], str]] = {
    "shapes": (lambda g: g.x + dt.uniform((5, 6), g.grid, Shard(0)), "do not broadcast"),
    "dimension": (lambda g: g.x.redistribute(Shard(2)), "it has dimensions 0 to 1"),
    "half a dimension": (lambda g: g.x.redistribute(Shard(0.5)), "it has dimensions 0 to 1"),  # type: ignore[arg-type]
    "sizes": (lambda g: g.x.redistribute(Shard(0, (1, 2))), "2 lengths that add up to 4"),
    "a list of sizes": (lambda g: g.x.redistribute(Shard(0, [1, 2])), "2 lengths that add up to 4"),  # type: ignore[arg-type]
    "placement": (lambda g: g.x.redistribute(0), "0 is not a placement"),
    "a word": (lambda g: dt.uniform((4, 6), g.grid, "rows"), "'rows' is not a placement"),  # type: ignore[arg-type]
    "no call": (lambda g: dt.uniform((4, 6), g.grid, Shard), "is not a placement"),  # type: ignore[arg-type]
    "no shape": (lambda g: dt.uniform(4, g.grid, Shard(0)), "4 is not a shape"),  # type: ignore[arg-type]
    "below zero": (lambda g: dt.uniform((-1, 3), g.grid, Shard(0)), "a length is 0 or more"),
    "indices": (
        lambda g: dt.from_function(lambda i, j: torch.ones(3, 3), (4, 4), g.grid, Shard(0)),
        r"returns \[3, 3\] for a piece of \[2, 4\]",
    ),
    "no grid": (lambda g: dt.uniform((4, 6), g.world, Shard(0)), r"give Grid\(rt.world\)"),  # type: ignore[arg-type]
    "grids": (lambda g: g.x + dt.uniform((4, 6), Grid(g.world), Shard(0)), "different Grid objects"),
    "grid": (lambda g: Grid(g.world, 3), "whose product is 2"),
    "grid of a tuple": (lambda g: Grid(g.world, (2, 1)), "one by one, as in Grid"),
    "operations": (lambda g: (g.x * 2 if g.rank else g.x + 1).full(), DIFFER),
    "earlier": (not_called_by_all, DIFFER),
    "layouts": (
        lambda g: g.x.redistribute(Replicate() if g.rank else Shard(1)),
        r"test_tensors_made.py:\d+: redistribute\(.* to Shard\(1\)\) on rank\(s\) 0; test_tensors_made.py:",
    ),
    "distributions": (
        lambda g: (dt.normal if g.rank else dt.uniform)((4, 6), g.grid, Shard(0)).full(),
        BEFORE,
    ),
    "seeds": (lambda g: dt.uniform((4, 6), g.grid, Shard(0), seed=g.rank).full(), BEFORE),
    "values": (lambda g: dt.full((4, 6), g.rank, g.grid, Shard(0)).full(), BEFORE),
    "made by one rank": (made_by_one, BEFORE),
    "rates": (other_rates, BEFORE),
    "root": (
        lambda g: dt.from_root(None, g.grid, Shard(0)),
        r"rank\(s\) 0: .* must give a tensor or a NumPy",
    ),
    "every root": (
        lambda g: dt.from_root(torch.ones(4), g.grid, Shard(0)),
        r"rank\(s\) 1: .* only rank 0 gives",
    ),
    "words on the root": (
        lambda g: dt.from_root(None if g.rank else np.array(["one", "two"]), g.grid, Shard(0)),
        r"rank\(s\) 0: from_root: an array of <U3: torch makes no tensor of it",
    ),
    "types of pieces": (
        lambda g: dt.from_pieces(
            torch.ones(2, 6, dtype=(torch.float32, torch.float64)[g.rank]), (4, 6), g.grid, Shard(0)
        ),
        DIFFER,
    ),
    "random integers": (
        lambda g: dt.uniform((4,), g.grid, Shard(0), dtype=torch.int64),
        "uniform of torch.int64: give a floating-point",
    ),
    "seed of words": (
        lambda g: dt.normal((4,), g.grid, Shard(0), seed="a"),  # type: ignore[arg-type]
        "normal: seed 'a': give an integer",
    ),
    "a number": (
        lambda g: dt.full((), 1.0, g.grid, Shard(0)),
        r"Shard\(0\) of a shape \[\]: it has no dimension",
    ),
    "no integer": (lambda g: g.x.sum(0.5), "sum: dimension 0.5: give an integer"),  # type: ignore[arg-type]
    "a type in words": (lambda g: g.x.to("float64"), "give a type of torch"),  # type: ignore[arg-type]
    "no equation": (lambda g: dt.einsum(g.x, g.x), "give the equation first"),  # type: ignore[arg-type]
    "no operand": (lambda g: dt.einsum("->"), "einsum: give at least one distributed tensor"),
    "measured less than never": (lambda g: dt.explain(dt.matmul, g.x, g.x.T, measure=-1), "measure=-1: give"),
    "with its line": (lambda g: g.x @ g.x, r"\(test_tensors_made.py:\d+\)$"),
    "no rank": (lambda g: g.x.on_root(9), "give one from 0 to 1"),
    "file": (
        lambda g: dt.load(g.folder / ("absent.npy" if g.rank else "there.npy"), g.grid, Shard(0)),
        r"rank\(s\) 1: \S*absent.npy: No such file",
    ),
    "absent safetensors": (
        lambda g: dt.load(g.folder / "absent.safetensors", g.grid, Shard(0), "x"),
        r"rank\(s\) 0, 1: \S*absent.safetensors: No such file or directory \(test_\S*\)$",
    ),
    "words": (lambda g: dt.load(g.folder / "words.npy", g.grid, Shard(0)), r"rank\(s\) 0, 1: .*words.npy"),
    "no array": (lambda g: dt.load(g.folder / "no-array.npy", g.grid, Shard(0)), "magic string"),
    "piece": (lambda g: dt.from_pieces(torch.ones(2 + g.rank, 6), (4, 6), g.grid, Shard(0)), "needed is"),
    "gradient": (lambda g: g.x.requires_grad_().backward(), "give its gradient"),
    "history": (lambda g: g.x.sum().backward(), "without history"),
    "order": (lambda g: g.x.norm("fro"), "norm of order 'fro'"),
    "truth": (lambda g: bool(g.x == g.x), NO_ARRAY),
    "number": (lambda g: float(g.x), NO_ARRAY),
    "element": (lambda g: g.x[0], NO_ARRAY),
    "no function": (lambda g: dt.pointwise("exp", g.x), "give a name, a function and operands"),
    "numbers only": (
        lambda g: dt.pointwise("exp", torch.exp, 1.0),
        "exp: give at least one distributed tensor",
    ),
    "no elementwise function": (
        lambda g: dt.pointwise("total", torch.sum, g.x),
        r"total: the function returns \[\] for a piece of \[2, 6\]",
    ),
    "way": (lambda g: dt.fft2(g.x, way="fast"), "fft2: no way 'fast'"),
    "explained way": (lambda g: dt.explain(dt.fft2, g.x, way="fast"), "fft2: no way 'fast'"),
    "transform of real numbers": (lambda g: dt.rfft2(g.x.to(torch.complex64)), "rfft2 of .* or call fft2"),
    "explained alone": (
        lambda g: dt.explain(dt.matmul, g.x, g.x.T, measure=2) if g.rank else g.x.full(),
        r"on rank\(s\) 0; test_tensors_made.py:\d+: explain\(matmul, .* measure=2\) on rank\(s\) 1",
    ),
    "no operation": (lambda g: dt.explain(g.x @ g.x.T), "give an operation and then its operands"),  # type: ignore[arg-type]
    "bool terms": (lambda g: (g.x > 0).redistribute(Partial()), "terms are numbers"),
    "bool product": (lambda g: (g.x > 0) @ (g.x > 0).T, "tensors of bool"),
    "no slice": (lambda g: dt.einsum("ij,jk->ik", g.x, g.x.T, memory=0), "no slice fits"),
    "tensordot": (lambda g: dt.tensordot(g.x, g.x.T, ([7], [0])), "dimension 7"),
    "calibration": (lambda g: calibrate(g.grid, largest=1 << 16), "give at least 1048576 bytes"),
}


def wrong(rt: Runtime, what: str, folder: Path) -> None:
    """Do something wrong, on all ranks or on one; every rank must raise a UsageError."""
    call, _ = WRONG[what]
    call(Given(rt.rank, rt.world, dt.uniform((4, 6), Grid(rt.world), Shard(0)), folder))


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_ends_every_rank(what: str, tmp_path: Path) -> None:
    np.save(tmp_path / "there.npy", np.ones((4, 6)))
    np.save(tmp_path / "words.npy", np.array(["one", "two"]))
    (tmp_path / "no-array.npy").write_text("some other file")
    with pytest.raises(RankError, match=WRONG[what][1]) as failure:
        spawn(wrong, 2, what, tmp_path)
    assert failure.value.code == 2


def test_integers_may_be_numpys() -> None:
    grid, one, two = Grid(Group.alone()), np.int64(1), np.int64(2)
    x, y = (dt.normal((4, 6), grid, Shard(p), seed=s) for p, s in ((np.int64(0), np.int64(1)), (-one, 2)))
    assert y.placements == (Shard(1),)
    whole = x.full()
    assert torch.equal(x.sum(one).full(), whole.sum(1))
    assert torch.equal(x.permute([1, 0]).full(), whole.T)
    assert torch.equal(x.transpose(-one, 0).full(), whole.T)
    assert torch.equal(dt.tensordot(x, y.T, one).full(), torch.tensordot(whole, y.full().T, 1))
    assert torch.equal(dt.fftn(x, dim=one).full(), torch.fft.fftn(whole, dim=1))
    for name in ("fft2", "rfft2", "irfft2"):
        assert torch.equal(getattr(dt, name)(x, (two, -1)).full(), getattr(torch.fft, name)(whole, (2, -1)))
    image, w = (dt.normal(shape, grid, Replicate()) for shape in ((1, 1, 9, 9), (1, 1, 3, 3)))
    found = dt.conv2d(image, w, stride=two, padding=np.array([1, 2]))
    assert torch.equal(found.full(), torch.conv2d(image.full(), w.full(), stride=2, padding=(1, 2)))


def test_placements_print_as_they_are_written() -> None:
    shown = repr((Shard(1), Shard(0, (2, 3)), Replicate(), Partial()))
    assert shown == "(Shard(1), Shard(0, (2, 3)), Replicate(), Partial())"


def test_what_an_array_has_and_a_distributed_tensor_has_not() -> None:
    with pytest.raises(AttributeError, match=r'pointwise\("exp", torch.exp, x\)'):
        dt.uniform((4,), Grid(Group.alone()), Shard(0)).exp()


def absent(rt: Runtime) -> None:
    """Call an operation on one rank only."""
    x = dt.uniform((4, 6), Grid(rt.world), Shard(0))
    if rt.rank == 0:
        x.full()


def test_a_rank_that_does_not_call_is_named() -> None:
    with pytest.raises(
        RankError,
        match=r"rank 0 stands in all_reduce of redistribute\(\[4, 6\] float32 Shard\(0\) to Replicate"
        r".*test_tensors_made.py:\d+ \(absent\)",
    ):
        spawn(absent, 2, limit=10)
