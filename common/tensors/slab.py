"""A two-dimensional transform of a matrix that is split by rows, in groups of columns that stay in cache.

    every row is transformed, and the columns of other ranks travel          fft along a row
    columns are stored in groups of STEP, each a tall matrix                 a row of a group: a few cache lines
    every group is transformed, and in natural order its rows travel back    fft along a column

Sender and receiver exchange views [rows, groups, STEP], which differ in how they lie in memory. With order="transposed"
the result stays split by columns, and a column lies in one run of memory: `local` is a transposed view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common import comm
from common.tensors.layout import Layout, Shard
from common.tensors.tensor import DistributedTensor

STEP = 32  # columns of a group
Views = tuple[Tensor, Tensor]  # [rows, groups, STEP], and the columns beyond the last whole group
KERNELS: dict[str, Callable[..., Tensor]] = {
    "fft": torch.fft.fft,
    "ifft": torch.fft.ifft,
    "rfft": torch.fft.rfft,
}


def fits(x: DistributedTensor, kind: str) -> bool:
    """Return True for fft, ifft and rfft of a matrix on CPUs, split by rows over one axis, without a gradient."""
    known = kind == "rfft" or (kind in KERNELS and x.dtype.is_complex)
    plain = x.ndim == 2 and x.device.type == "cpu" and not (torch.is_grad_enabled() and x.requires_grad)
    by_rows = len(x.grid.shape) == 1 and len(x.layout.cut_along(0)) == 1
    return known and plain and by_rows and min(x.shape) >= x.grid.world.size > 1


def layouts(x: DistributedTensor, kind: str) -> tuple[Layout, Layout]:
    """Return how the result lies in natural order, split by rows, and transposed, split by columns."""
    N = x.shape[1] // 2 + 1 if kind == "rfft" else x.shape[1]
    rows = Layout.of(x.grid, (x.shape[0], N), x.placements)
    return rows, rows.placed(Shard(1))


def slab(x: DistributedTensor, kind: str, norm: str, order: str) -> DistributedTensor:
    """Return the transform of a matrix for which `fits` is True."""
    rows, columns = layouts(x, kind)
    x.grid.meet()
    if len(x.local):
        x_mN = KERNELS[kind](x.local, norm=norm)
    else:  # the kernels refuse empty tensors
        x_mN = x.local.new_empty(rows.local_shape, dtype=x.dtype.to_complex())
    lo, hi = columns.mine[1]
    groups = Groups(rows.shape[0], hi - lo, x_mN)
    here = [parted(x_mN[:, slice(*box[1])]) for box in columns.boxes]
    gathered = [groups.views(slice(*box[0])) for box in rows.boxes]
    _swap(gathered, here, columns)
    along = KERNELS["fft" if kind == "rfft" else kind]
    if order == "natural":
        for group in groups.parts():
            group.copy_(along(group, dim=0, norm=norm))
        _swap(here, gathered, columns)
        return DistributedTensor(x_mN, rows)
    del x_mN, here  # their memory serves the result
    c_NM = groups.whole.new_empty(groups.width, rows.shape[0])
    for i, group in enumerate(groups.parts()):
        c_NM[i * STEP : (i + 1) * STEP] = along(group, dim=0, norm=norm).T
    return DistributedTensor(c_NM.T, columns)


class Groups:
    """Columns of a matrix in groups of STEP; each group is stored row by row."""

    def __init__(self, height: int, width: int, like: Tensor) -> None:
        self.width = width
        self.whole = like.new_empty(width // STEP, height, STEP)
        self.rest = like.new_empty(height, width % STEP)

    def parts(self) -> Iterator[Tensor]:
        """Return each group as a matrix of all rows."""
        yield from self.whole
        if self.rest.numel():
            yield self.rest

    def views(self, rows: slice) -> Views:
        """Return views of some rows."""
        return self.whole[:, rows].transpose(0, 1), self.rest[rows]


def parted(x_mN: Tensor) -> Views:
    """Return views of the matrix's columns as `Groups` stores them."""
    cut = x_mN.shape[1] - x_mN.shape[1] % STEP
    return x_mN[:, :cut].unflatten(1, (-1, STEP)), x_mN[:, cut:]


def _swap(places: Sequence[Views], pieces: Sequence[Views], columns: Layout) -> None:
    """Send pieces[r] to rank r, and fill places[r] with the matrix of rank r."""
    world = replace(columns.grid.world, axis="grid")
    comm.all_to_all_views([groups for groups, _ in places], [groups for groups, _ in pieces], world)
    if any((hi - lo) % STEP for _, (lo, hi) in columns.boxes):
        comm.all_to_all_views([rest for _, rest in places], [rest for _, rest in pieces], world)
