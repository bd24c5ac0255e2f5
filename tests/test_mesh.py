"""The mesh covers the world, its groups agree on all ranks, and the gradient norm counts elements once."""

from __future__ import annotations

import itertools

import pytest
import torch

from common import comm
from common.comm import Group
from common.comm.mesh import AXES, Mesh
from common.comm.placement import Shard, gradient_axes, gradient_norm, place
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn


def world(size: int, rank: int = 0) -> Group:
    return Group("world", rank, size, tuple(range(size)))


def test_coordinates_count_with_tp_innermost() -> None:
    shape = dict(pp=2, dp=1, ep=2, sp=3, tp=2)
    mesh = Mesh(world(24), **shape)
    places = [tuple(mesh.coordinates(r).values()) for r in range(24)]
    assert places == list(itertools.product(*(range(shape[a]) for a in AXES)))


def test_wrong_product_says_what_fits() -> None:
    with pytest.raises(UsageError, match=r"tp=2 needs 6 ranks, the world has 4; dp=2 would fit"):
        Mesh(world(4), dp=3, tp=2)
    with pytest.raises(UsageError, match="every axis needs at least 1"):
        Mesh(world(4), dp=0)
    with pytest.raises(UsageError, match="axis 'xp' is unknown"):
        Mesh(world(1)).group("xp")


def sums(rt: Runtime, shape: dict[str, int]) -> dict[tuple[str, ...], tuple[int, ...]]:
    mesh = Mesh(rt.world, **shape)
    seen = {}
    for axes in (("dp",), ("tp",), ("pp", "tp"), ("dp", "ep", "sp"), AXES):
        group = mesh.group(*axes)
        total = torch.tensor([float(2**rt.rank)])
        comm.all_reduce(total, group)
        assert total.item() == sum(2**r for r in group.ranks)
        same = [
            r
            for r in range(rt.world_size)
            if all(mesh.coordinates(r)[a] == mesh.at[a] for a in AXES if a not in axes)
        ]
        assert list(group.ranks) == same
        seen[axes] = group.ranks
    return seen


@pytest.mark.parametrize("shape", [dict(dp=4), dict(pp=2, tp=2), dict(dp=2, sp=3), dict(pp=2, dp=2, tp=2)])
def test_groups_hold_the_ranks_that_differ_along_their_axes(shape: dict[str, int]) -> None:
    size = 1
    for n in shape.values():
        size *= n
    spawn(sums, size, shape)


def norm(rt: Runtime) -> float:
    mesh = Mesh(rt.world, dp=2, tp=2)
    whole = torch.arange(8.0, dtype=torch.float64)
    replicated, sharded = torch.nn.Parameter(whole.clone()), torch.nn.Parameter(whole[:4].clone())
    replicated.grad = whole.clone()
    sharded.grad = whole.chunk(2)[mesh.at["tp"]].clone()
    place(sharded, "tp", Shard(0))
    assert gradient_axes(replicated) == ("dp", "ep", "sp")
    expert = torch.nn.Parameter(whole)
    place(expert, "ep", Shard(0))
    assert gradient_axes(expert) == ("dp", "sp")
    return gradient_norm([replicated, sharded], mesh).item()


def test_norm_counts_every_number_once() -> None:
    squares = 2 * sum(i * i for i in range(8))
    assert spawn(norm, 4) == pytest.approx([squares**0.5] * 4, rel=1e-12)
