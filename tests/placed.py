"""Tensors placed on a mesh in every possible way; each rank cuts its shards from the whole tensors."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

from common.comm import sizes_of
from common.comm.mesh import Mesh
from common.comm.placement import FlatShard, Shard, piece, place, tie

from hybrid_pieces import Entry

# shape, the dimension that each axis cuts, and the layer that owns it
TENSORS: dict[str, tuple[tuple[int, ...], dict[str, int], int]] = {
    "embed.weight": ((11, 6), {"tp": 0}, -1),  # tied: the first stage and the last have it
    "layers.0.up.weight": ((9, 5), {"tp": 0}, 0),
    "layers.0.down.weight": ((5, 9), {"tp": 1}, 0),
    "layers.1.experts.weight": ((8, 3, 13), {"ep": 0, "tp": 2}, 1),
    "layers.1.norm.weight": ((7,), {}, 1),
    "layers.1.scale": ((), {}, 1),
}


def whole(name: str) -> Tensor:
    """Return the whole tensor in float64, as on one device."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = TENSORS.get(name.removeprefix("optimizer.exp_avg."), ((),))[0]
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def uneven(total: int, n: int) -> tuple[int, ...]:
    """Return uneven sizes: 0 for the first of three or more ranks, the remainder on the last ranks."""
    rest = max(1, n - 1) if n > 2 else n
    return (*[0] * (n - rest), *sizes_of(total, rest)[::-1])


def cut(name: str, mesh: Mesh, zero: bool) -> nn.Parameter:
    """Return this rank's shard with its placement; if `zero`, a run of it along dp."""
    shape, axes, layer = TENSORS[name]
    x, p = torch.empty(shape), torch.empty(shape)
    for axis, dim in axes.items():
        if mesh.shape[axis] > 1:
            place(p, axis, Shard(dim, tuple(reversed(sizes_of(shape[dim], mesh.shape[axis])))))
    if zero:
        left = piece(x, p, mesh).shape
        place(p, "dp", FlatShard(left, uneven(math.prod(left), mesh.shape["dp"])))
    mine = nn.Parameter(piece(whole(name), p, mesh).clone())
    mine.placement = getattr(p, "placement", {})
    holders = mesh.part("pp", (0, mesh.shape["pp"] - 1), "tied") if layer < 0 else None
    if holders is not None and holders.size > 1:
        tie(mine, holders)
    return mine


def here(layer: int, mesh: Mesh) -> bool:
    at, stages = mesh.at["pp"], mesh.shape["pp"]
    return at in (0, stages - 1) if layer < 0 else at == layer % stages


def entries(mesh: Mesh, zero: bool) -> list[Entry]:
    """Return this rank's tensors, each with an optimizer state of its shape and a scalar one."""
    found = []
    for name, (_, _, layer) in TENSORS.items():
        p = cut(name, mesh, zero)
        if here(layer, mesh):
            state = f"optimizer.exp_avg.{name}"
            found += [
                Entry(name, p, p),
                Entry(state, piece(whole(state), p, mesh).clone(), p),
                Entry(f"optimizer.step.{name}", torch.tensor(float(len(name))), p),
            ]
    return found


def wrong(found: list[Entry], mesh: Mesh, zero: bool) -> list[str]:
    """Return the names of the entries that differ, in any bit, from those that `entries` makes."""
    right = {e.name: e.tensor for e in entries(mesh, zero)}
    assert right.keys() == {e.name for e in found}
    return [e.name for e in found if not torch.equal(e.tensor, right[e.name])]


@torch.no_grad()
def spoil(found: list[Entry]) -> list[Entry]:
    """Overwrite the entries with NaN and return them."""
    for e in found:
        e.tensor.fill_(torch.nan)
    return found
