"""Distributed tensors: layouts, moves between them and their gradients, how they are made, bad input."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import tensor_cases as cases
from hypothesis import strategies as st
from mpi.launch import ROOT, mpirun, need_module, python

from common.comm.ledger import Ledger
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import DistributedTensor, Grid, Partial, Replicate, Shard, conv2d
from common.tensors.transfer import bytes_sent

WORLDS = (1, 2, 3, 4, 5, 6)


def move(grid: Grid, data: Any, longest: int = 7) -> None:
    """Compare a move between two layouts, its gradient and its bytes with the whole tensor."""
    shape = data.draw(cases.shapes(longest=longest))
    dtype = data.draw(st.sampled_from(cases.NUMBERS))
    before, after = (data.draw(cases.placements(grid, shape)) for _ in range(2))
    whole = cases.numbers(shape, dtype)
    x = cases.spread(whole, grid, before)
    if data.draw(st.booleans()):
        x = DistributedTensor(x.local.contiguous(), x.layout)
    x.requires_grad_()
    with Ledger() as ledger:
        y = x.redistribute(*after)
    assert ledger.bytes() == bytes_sent(x.layout, y.layout, dtype.itemsize)
    cases.assert_close(y.full().detach(), whole)
    gradient = cases.numbers(shape, dtype, seed=1)
    y.backward(cases.spread(gradient, grid, data.draw(cases.placements(grid, shape))))
    assert x.grad is not None
    cases.assert_close(x.grad.full(), gradient)
    root = data.draw(st.integers(0, grid.world.size - 1))
    found = x.on_root(root)
    assert (found is not None) == (grid.world.rank == root)
    if found is not None:
        cases.assert_close(found, whole)


@pytest.mark.parametrize("n", WORLDS)
def test_move(n: int) -> None:
    cases.on_grids(n, move)


def as_many_terms_as_numbers(grid: Grid, data: Any) -> None:
    """Move terms to a piece that is as long as all the terms that a rank receives for a part of it."""
    whole = cases.numbers((3,))
    axes = len(grid.shape)
    x = cases.spread(whole, grid, (Partial(), Shard(0))[:axes])
    cases.assert_close(x.redistribute(*(Shard(0), Partial())[:axes]).full(), whole)


def test_terms_for_a_part() -> None:
    cases.on_grids(6, as_many_terms_as_numbers, 2)


def no_grid_stays(rt: Runtime) -> None:
    """Move and convolve on a grid, which must be freed with its tensors: it holds memory of the ranks."""
    grid = Grid(rt.world)
    x = cases.spread(cases.numbers((2, 3, 8, 8)), grid, (Shard(2),))
    w = cases.spread(cases.numbers((4, 3, 3, 3)), grid, (Replicate(),))
    conv2d(x, w, padding=1, way="height").redistribute(Shard(0)).sum().full()
    assert grid.caches
    found = weakref.ref(grid)
    del grid, x, w
    gc.collect()
    assert found() is None


def test_a_grid_is_freed_with_its_tensors() -> None:
    spawn(no_grid_stays, 2)


@pytest.mark.parametrize("n", [2, 3])
def test_on_mpi(n: int) -> None:
    """The ranks of a host exchange views through the memory that they share; transforms need as much as predicted."""
    need_module("fived_c10d")
    worker = ROOT / "tests" / "mpi" / "tensors_worker.py"
    done = mpirun(n, python(), worker, str(cases.EXAMPLES), timeout=240 + 3 * cases.EXAMPLES)
    assert done.returncode == 0, done.stderr
