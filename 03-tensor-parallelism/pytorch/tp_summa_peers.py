"""The product of tp_summa.py by torch's DTensor, to be timed beside ours.

DTensor gets the same blocks as our own version and returns C in the same blocks, in two ways: by its own plan
for the product, and told to gather a block row of A and a block column of B first, which is SUMMA with a
single panel. Both allocate the gathered blocks and C anew in each call; DTensor cannot write into given
memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tp_grid import Blocks

# silence a warning of every rank, that on CPUs DTensor does without an all-to-all
logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)


def dtensor(a: Tensor, b: Tensor, blocks: Blocks) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute C by DTensor, by name.

    The grid must hold all ranks of the world, in order. The result is empty for one rank, for several layers,
    and for sizes that the grid does not divide.
    """
    grid = blocks.grid
    even = all(length % line == 0 for length in blocks.shape for line in (grid.rows, grid.columns))
    lines = [(dim, line.pg) for dim, line in enumerate((grid.column, grid.row)) if line.pg is not None]
    if grid.layers > 1 or not even or not lines:
        return {}
    if len(lines) == 1:
        mesh = DeviceMesh.from_group(lines[0][1], a.device.type)
    else:
        ranks = torch.arange(grid.rows * grid.columns).view(grid.rows, grid.columns)
        names = ("column", "row")
        mesh = DeviceMesh.from_group([pg for _, pg in lines], a.device.type, ranks, mesh_dim_names=names)

    def lies(*cut: int) -> list[Placement]:
        """Return the placements of a matrix that is sharded on these dimensions, replicated on the others."""
        return [Shard(dim) if dim in cut else Replicate() for dim, _ in lines]

    whole_a = DTensor.from_local(a, mesh, lies(0, 1), run_check=False)
    whole_b = DTensor.from_local(b, mesh, lies(0, 1), run_check=False)

    def call(gather: bool) -> Tensor:
        x, y = whole_a, whole_b
        if gather:
            x, y = x.redistribute(placements=lies(0)), y.redistribute(placements=lies(1))
        c: Tensor = (x @ y).redistribute(placements=lies(0, 1)).to_local()  # type: ignore[attr-defined]
        return c

    return {"DTensor": partial(call, False), "DTensor gathered": partial(call, True)}
