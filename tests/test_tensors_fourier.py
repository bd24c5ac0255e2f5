"""Fourier transforms along split and unsplit dimensions, by every way, against torch on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from common.tensors import DistributedTensor, Grid, Replicate, Shard, fourier, slab
from common.tensors.cost import ways_of
from common.utils.memory import peak_allocated

WORLDS = (1, 2, 3, 4, 5)
NORMS = ("backward", "ortho", "forward")


def transform(grid: Grid, data: Any) -> None:
    """Compare a transform by any of its ways with torch's: result, gradients, bytes."""
    kind = data.draw(st.sampled_from(["fft", "ifft", "rfft", "irfft"]))
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    dims = data.draw(st.lists(st.integers(-len(shape), -1), unique=True, min_size=1))
    s = data.draw(st.one_of(st.none(), st.just([data.draw(st.integers(2, 9)) for _ in dims])))
    if kind == "irfft" and s is None and shape[dims[-1]] < 2:
        return
    dtype = data.draw(st.sampled_from(cases.FLOATS if kind == "rfft" else cases.NUMBERS))
    norm, order = data.draw(st.sampled_from(NORMS)), data.draw(st.sampled_from(["natural", "transposed"]))
    whole = cases.numbers(shape, dtype).requires_grad_()
    x = cases.spread(whole.detach(), grid, data.draw(cases.placements(grid, shape))).requires_grad_()
    way = data.draw(st.sampled_from(ways_of(fourier._transform, kind, x, s, dims, norm, order, None)))
    with Ledger() as ledger:
        found = fourier._transform(kind, x, s, dims, norm, order, way.name)
    assert ledger.bytes() == way.cost.sent, way.name
    theirs: Any = getattr(torch.fft, f"{kind}n")
    cases.sampled_gradient(found, theirs(whole, s, dims, norm), data)
    cases.assert_gradients([x], [whole])
    if order == "natural" and s is None and kind in ("fft", "ifft") and not x.layout.partial:
        assert found.placements == x.placements
    named = [getattr(fourier, f"{kind}n"), *([getattr(fourier, kind)] if len(dims) == 1 else [])]
    if kind != "irfft" and len(dims) == 2:
        named.append(getattr(fourier, f"{kind}2"))
    for function in named:
        one = function.__name__ == kind
        arguments = (s[0] if s else None, dims[0]) if one else (s, dims)
        again = function(x, *arguments, norm).full().detach()
        cases.assert_close(again, theirs(whole, s, dims, norm).detach(), times=500)


@pytest.mark.parametrize("n", WORLDS)
def test_transforms(n: int) -> None:
    cases.on_grids(n, transform)


def matrices(grid: Grid, data: Any, widest: int = 150) -> None:
    """Compare the ways of a transform of a matrix without a gradient, with transposing exchanges among them.

    With the transposing way each rank transforms and sends all rows at once, or 32 of them.
    """
    kind = data.draw(st.sampled_from(["fft", "ifft", "rfft"]))
    lengths = st.integers(1, 9), st.integers(1, widest)
    shape = data.draw(
        st.one_of(st.tuples(*lengths), st.tuples(*reversed(lengths)), st.tuples(lengths[1], lengths[1]))
    )
    order, norm = data.draw(st.sampled_from(["natural", "transposed"])), data.draw(st.sampled_from(NORMS))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    whole = cases.numbers(shape, dtype if kind == "rfft" else dtype.to_complex())
    x = cases.spread(whole, grid, data.draw(cases.placements(grid, shape)))
    x = DistributedTensor(x.local.contiguous(), x.layout)
    expected = getattr(torch.fft, f"{kind}2")(whole, norm=norm)
    done = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab, "BAND", data.draw(st.sampled_from([1, slab.BAND])))
        for way in ways_of(fourier._transform, kind, x, None, (0, 1), norm, order, None):
            with Ledger() as ledger:
                found = way.run()
            done.append((way, ledger.bytes(), found.full()))
    for way, sent, found in done:  # after all messages, so that a rank that fails stays in step
        assert sent == way.cost.sent, way.name
        cases.assert_close(found, expected, times=500)


@pytest.mark.parametrize("n", WORLDS)
def test_matrices(n: int) -> None:
    cases.on_grids(n, matrices)


def long(rt: Runtime) -> None:
    """Transform one dimension over all ranks in six steps; a prime length on every rank."""
    grid = Grid(rt.world)
    for length in (12, 35, 64, 13):
        for dtype in (torch.complex128, torch.float64):
            whole = cases.numbers((length,), dtype)
            x = cases.spread(whole, grid, [Shard(0)])
            names = [w.name for w in ways_of(fourier.fft, x)]
            assert names == ["on every rank", *(["six steps"] if length != 13 else [])]
            for name in names:
                cases.assert_close(fourier.fft(x, way=name).full(), torch.fft.fft(whole), times=200)
    x = dt.from_full(cases.numbers((64, 48), torch.complex64), grid, Shard(0))
    with Ledger() as once:
        split = fourier.fft2(x, order="transposed")
    assert split.placements == (Shard(1),)
    n = rt.world_size
    if 64 % n == 0 and 48 % n == 0:
        assert once.bytes() == 64 * 48 * 8 * (n - 1) // n**2
    with Ledger() as twice:
        fourier.fft2(x)
    assert twice.bytes() >= 2 * once.bytes() * 0.9
    sizes = ((16, 12), "natural"), ((9, 7), "transposed"), ((n, n), "natural")
    for size, order in sizes:
        whole = cases.numbers(size, torch.complex128)
        x = dt.from_full(whole, grid, Shard(0))
        for kind in ("fft2", "ifft2"):
            found = getattr(fourier, kind)(x, order=order, norm="ortho", way="transposing")
            assert torch.equal(x.full(), whole), "the operand was changed"
            cases.assert_close(found.full(), getattr(torch.fft, kind)(whole, norm="ortho"), times=200)
            assert found.placements == ((Shard(0),) if order == "natural" else (Shard(1),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab, "BAND", 1)  # several bands of 32 rows, the last one shorter
        whole = cases.numbers((90 * n, 150 * n + 1), torch.float64)
        for order in ("natural", "transposed"):
            found = fourier.rfft2(dt.from_full(whole, grid, Shard(0)), order=order, way="transposing")
            cases.assert_close(found.full(), torch.fft.rfft2(whole), times=500)
    with Ledger() as none:
        fourier.rfft(dt.full((4, 8), 1.0, grid, Shard(0)))
    assert none.bytes() == 0


@pytest.mark.parametrize("n", [2, 3, 4])
def test_long_transforms(n: int) -> None:
    spawn(long, n)


def by_differences(rt: Runtime) -> None:
    """Compare gradients with finite differences."""
    grid = Grid(rt.world)
    kinds = {
        "fftn": ((4, 3), torch.complex128),
        "fft": ((6,), torch.complex128),
        "rfft2": ((3, 4), torch.float64),
        "irfft2": ((3, 4), torch.complex128),
    }
    for kind, (shape, dtype) in kinds.items():

        def f(x: Tensor, kind: str = kind) -> Tensor:
            return getattr(fourier, kind)(dt.from_full(x, grid, Shard(0))).full()

        assert torch.autograd.gradcheck(f, (cases.numbers(shape, dtype).requires_grad_(),))
    x = cases.numbers((6,), torch.complex128).requires_grad_()

    def six(x: Tensor) -> Tensor:
        return fourier.ifft(dt.from_full(x, grid, Shard(0)), way="six steps").full()

    assert torch.autograd.gradcheck(six, (x,))


def test_by_differences() -> None:
    spawn(by_differences, 2)


def test_bad_input() -> None:
    x = dt.full((4, 6), 1.0, Grid(Group.alone()), Replicate())
    for call, words in (
        (lambda: fourier.fft(x, dim=2), r"dimensions \[2\] of a tensor with 2"),
        (lambda: fourier.fft(x, norm="unitary"), "choose one of backward, ortho, forward"),
        (lambda: fourier.fft2(x, order="sorted"), "choose one of natural, transposed"),
        (lambda: fourier.fftn(x, (4,), (0, 1)), "each dimension once, with one length"),
        (lambda: fourier.rfft(x.to(torch.complex64)), "give real numbers"),
        (lambda: fourier.fft(x, n=0), "give at least 1"),
        (lambda: fourier.fft2(x.to(torch.float16)), r"fft2 of torch.float16: torch has none on CPUs"),
    ):
        with pytest.raises(UsageError, match=words):
            call()


def memory(rt: Runtime) -> None:
    """Compare the memory that each way of a transform needs with its predicted one; on MPI, which frees at once."""
    grid, wide = Grid(rt.world), torch.complex64
    calls: list[tuple[Callable[..., Any], tuple[int, ...], torch.dtype, dict[str, Any]]] = [
        (fourier.fft, (1 << 18,), wide, {}),
        (fourier.fft, (1 << 18,), torch.float32, {}),
        (fourier.irfft, (1 << 17,), wide, {}),
        (fourier.fft, (512, 1024), wide, {"n": 2048}),
        (fourier.fftn, (64, 64, 64), wide, {}),
    ]
    for order in ("natural", "transposed"):
        calls += [
            (fourier.fft2, shape, wide, {"order": order})
            for shape in ((1 << 15, 64), (64, 1 << 14), (2048, 512))
        ]
        calls += [(fourier.rfft2, (512, 2048), torch.float32, {"order": order})]
        calls += [(fourier.irfft2, (512, 1025), wide, {"order": order})]
    for transform, shape, dtype, options in calls:
        x = dt.normal(shape, grid, Shard(0), dtype=dtype)
        for way in ways_of(transform, x, **options):
            way.run()
            peak, cost = peak_allocated(way.run), way.cost
            packed = 2 * cost.sent  # at most: the backend's copies of what is sent and received
            assert 0.9 * cost.memory <= peak <= 1.02 * cost.memory + packed, (
                shape,
                options,
                way.name,
                peak,
                cost.memory,
            )


def lines(rt: Runtime) -> None:
    """Predict the transforms of the rank that has most rows, and of their own length."""
    grid = Grid(rt.world)
    x = dt.from_full(torch.ones(64, 30), grid, Shard(0, (60, 4)))
    [way] = [w for w in ways_of(fourier.rfft2, x) if w.name == "transposing"]
    found = [term.sizes for term in way.cost.terms if term.kind == "transform"]
    assert found == [(60, 30, 1), (8, 64, 1)]


def test_lines() -> None:
    spawn(lines, 2)


def of_integers(rt: Runtime) -> None:
    """Transform integers and bools, which torch converts."""
    grid = Grid(rt.world)
    for dtype in (torch.int64, torch.bool):
        whole = (torch.arange(12 * 7).view(12, 7) % 5).to(dtype)
        x = dt.from_full(whole, grid, Shard(0))
        for kind in ("fft2", "rfft2"):
            cases.assert_close(getattr(fourier, kind)(x).full(), getattr(torch.fft, kind)(whole), times=200)


def test_integers() -> None:
    spawn(of_integers, 2)


def with_and_without_gradient(rt: Runtime) -> None:
    """Transform without a gradient, whose way a gradient does not allow, and then with one."""
    grid = Grid(rt.world)
    x = dt.normal((64, 96), grid, Shard(0))
    with torch.no_grad():
        names = [way.name for way in ways_of(fourier.rfft2, x)]
        assert "transposing" in names
        fourier.rfft2(x)
    assert "transposing" in grid.chosen.values()
    y = dt.normal((64, 96), grid, Shard(0)).requires_grad_()
    abs(fourier.rfft2(y)).sum().backward()
    assert y.grad is not None


def transposed_is_split_by_columns(rt: Runtime) -> None:
    """However small a matrix is, its transposed transform lies along the other dimension."""
    grid = Grid(rt.world)
    for shape in ((2, 2), (6, 4), (16, 16), (1, 5)):
        for dim in (0, 1):
            found = fourier.fft2(dt.uniform(shape, grid, Shard(dim)), order="transposed")
            assert found.placements == (Shard(1 - dim),)


@pytest.mark.parametrize("check", [with_and_without_gradient, transposed_is_split_by_columns])
def test_choice(check: Any) -> None:
    spawn(check, 2)
