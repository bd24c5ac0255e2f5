"""Random distributed tensors for property tests: all ranks draw the same examples and judge them together.

    on_grids(n, check)        # check(grid, data): one example; raises AssertionError

Hypothesis draws inside the ranks, from a fixed seed. A failure on one rank counts on all, so that the ranks go on in
step while a smaller example is sought.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common import comm
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import DistributedTensor, Grid, Partial, Replicate, Shard, from_full, from_pieces
from common.tensors.layout import Placement

GRIDS = {
    1: [(1,)],
    2: [(2,), (2, 1)],
    3: [(3,)],
    4: [(4,), (2, 2), (2, 1, 2)],
    5: [(5,)],
    6: [(6,), (2, 3), (3, 2)],
}
EXAMPLES = int(os.environ.get("FIVED_EXAMPLES", "16"))  # of each test; make test-slow takes more
FLOATS = (torch.float64, torch.float32)
NUMBERS = (*FLOATS, torch.complex128, torch.complex64)


def on_grids(n: int, check: Callable[[Grid, Any], None], examples: int = EXAMPLES) -> None:
    """Run `check` on n ranks and random examples, an equal number on each grid of these ranks."""
    spawn(examples_of, n, check, examples, limit=60 + 2 * examples)


def examples_of(rt: Runtime, check: Callable[[Grid, Any], None], examples: int) -> None:
    """Run `check` on random examples, an equal number on each grid of these ranks."""
    grids = GRIDS[rt.world_size]
    for shape in grids:
        _one(Grid(rt.world, *shape), check, -(-examples // len(grids)))


def _one(grid: Grid, check: Callable[[Grid, Any], None], examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data: Any) -> None:
        problem = ""
        try:
            check(grid, data)
        except AssertionError:
            problem = traceback.format_exc()
        found = [text for text in comm.everyones(problem, grid.world) if text]
        assert not found, found[0]

    one()


def shapes(least: int = 0, most: int = 3, longest: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    """Return shapes with lengths from 0, so that there are fewer rows than ranks, and empty tensors."""
    return st.lists(st.integers(0, longest), min_size=least, max_size=most).map(tuple)


@st.composite
def placements(
    draw: Any, grid: Grid, shape: Sequence[int], partial: bool = True, uneven: bool = True
) -> tuple[Placement, ...]:
    """Draw a placement for each axis of the grid; some cut the same dimension, some unevenly."""
    found: list[Placement] = []
    cut: set[int] = set()
    for n in grid.shape:
        kinds = ["replicate", *(["shard"] if shape else []), *(["partial"] if partial else [])]
        kind = draw(st.sampled_from(kinds))
        if kind == "shard":
            dim = draw(st.integers(0, len(shape) - 1))
            sizes = None
            if uneven and dim not in cut and draw(st.booleans()):
                ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=n - 1, max_size=n - 1)))
                sizes = tuple(b - a for a, b in zip([0, *ends], [*ends, shape[dim]], strict=True))
            cut.add(dim)
            found.append(Shard(dim, sizes))
        else:
            found.append(Replicate() if kind == "replicate" else Partial())
    return tuple(found)


def numbers(shape: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return normal numbers, the same on every rank."""
    return torch.randn(tuple(shape), dtype=dtype, generator=torch.Generator().manual_seed(seed))


def spread(whole: Tensor, grid: Grid, placed: Sequence[Placement]) -> DistributedTensor:
    """Return a tensor that every rank holds whole in any layout; terms differ from rank to rank. A leaf."""
    lies = [Replicate() if isinstance(p, Partial) else p for p in placed]
    piece = from_full(whole.detach(), grid, lies).local.clone()
    ranks = [a for a, p in enumerate(placed) if isinstance(p, Partial)]
    if ranks:
        n = 1
        for a in ranks:
            n *= grid.shape[a]
        piece = piece / n
        for a in ranks:  # a term that sums to zero along the axis
            noise = (
                (torch.arange(piece.numel(), dtype=torch.float64) % 7 + 1).view(piece.shape).to(piece.dtype)
            )
            at, length = grid.place[a], grid.shape[a]
            piece = piece + noise * (at - (length - 1) / 2) / 8
    # a piece with gaps in memory, where it has two dimensions
    if piece.ndim > 1:
        piece = piece.transpose(0, -1).contiguous().transpose(0, -1)
    return from_pieces(piece.detach(), whole.shape, grid, placed)


def sampled_gradient(found: DistributedTensor, expected: Tensor, data: Any, times: float = 500.0) -> None:
    """Compare a result with torch's, and send the same random gradient back through both."""
    assert_close(found.full().detach(), expected.detach(), times)
    gradient = numbers(expected.shape, expected.dtype, seed=9)
    expected.backward(gradient)
    found.backward(spread(gradient, found.grid, data.draw(placements(found.grid, expected.shape))))


def assert_gradients(
    tensors: Sequence[DistributedTensor], wholes: Sequence[Tensor], times: float = 500.0
) -> None:
    """Assert that each distributed tensor has the gradient of its whole."""
    for x, whole in zip(tensors, wholes, strict=True):
        assert x.grad is not None
        assert whole.grad is not None
        assert_close(x.grad.full(), whole.grad, times)


def assert_close(found: Tensor, expected: Tensor, times: float = 50.0) -> None:
    """Assert equality within `times` roundings of the largest number; NaN in the same places."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    if expected.numel():
        assert torch.equal(found.isnan(), expected.isnan()), f"{found}\n{expected}"
        found, expected = found.nan_to_num(), expected.nan_to_num()
        real = expected.abs().dtype
        scale = float(expected.abs().max()) or 1.0
        apart = float((found - expected).abs().max()) / scale
        assert apart <= times * torch.finfo(real).eps, f"{apart:.2e}\n{found}\n{expected}"
