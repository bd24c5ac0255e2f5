"""A two-dimensional transform of a matrix that is split by rows, in blocks that stay in cache.

    a block of rows is transformed, and other ranks' columns of it travel      fft along a row
    columns are stored in groups of STEP, each a tall matrix                   a row of a group: a few cache lines
    a group is transformed, and in natural order its rows travel back          fft along a column

With order="transposed" the result stays split by columns, and a column lies in one run of memory: `local` is a
transposed view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common import comm
from common.tensors.layout import Layout, Shard
from common.tensors.tensor import DistributedTensor

BLOCK = 2**19  # numbers that are transformed, and sent, at a time
STEP = 32  # columns of a group
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
    groups = _split_by_columns(x.local, rows, columns, lambda block: KERNELS[kind](block, norm=norm))
    along = KERNELS["fft" if kind == "rfft" else kind]
    if order == "natural":
        for group in groups.parts():
            group.copy_(along(group, dim=0, norm=norm))
        return DistributedTensor(_split_by_rows(groups, rows, columns), rows)
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

    def store(self, row: int, block: Tensor) -> None:
        """Store rows of all columns, the first one as `row`."""
        rows, cut = slice(row, row + len(block)), self.width - self.width % STEP
        self.whole[:, rows] = block[:, :cut].unflatten(1, (-1, STEP)).transpose(0, 1)
        self.rest[rows] = block[:, cut:]

    def rows(self, begin: int, end: int, first: int, last: int) -> Tensor:
        """Return rows begin to end of columns first to last, first and last multiples of STEP or the end."""
        found = self.whole[first // STEP : last // STEP, begin:end].transpose(0, 1).flatten(1)
        return torch.cat([found, self.rest[begin:end]], 1) if last % STEP else found


def _split_by_columns(
    x_mN: Tensor, rows: Layout, columns: Layout, kernel: Callable[[Tensor], Tensor]
) -> Groups:
    """Return this rank's columns of the matrix whose rows are transformed by `kernel`."""
    group = rows.grid.world
    height, (lo, hi) = rows.shape[0], columns.mine[1]
    groups = Groups(height, hi - lo, x_mN.new_empty(0, dtype=x_mN.dtype.to_complex()))
    for spans in _rounds([box[0] for box in rows.boxes], BLOCK // rows.shape[1]):
        begin = rows.mine[0][0]
        block = x_mN[slice(*(n - begin for n in spans[group.rank]))]
        block = kernel(block) if len(block) else groups.rest.new_empty(0, rows.shape[1])
        came = _swapped(
            [block[:, slice(*box[1])] for box in columns.boxes], [(b - a, hi - lo) for a, b in spans], group
        )
        for (row, _), part in zip(spans, came, strict=True):
            groups.store(row, part)
    return groups


def _split_by_rows(groups: Groups, rows: Layout, columns: Layout) -> Tensor:
    """Return this rank's rows of the matrix."""
    group, (lo, hi) = rows.grid.world, rows.mine[0]
    out = groups.whole.new_empty(hi - lo, rows.shape[1])
    each = max(1, BLOCK // rows.shape[0] // STEP) * STEP
    for spans in _rounds([box[1] for box in columns.boxes], each):
        begin = columns.mine[1][0]
        first, last = (n - begin for n in spans[group.rank])
        came = _swapped(
            [groups.rows(*box[0], first, last) for box in rows.boxes],
            [(hi - lo, b - a) for a, b in spans],
            group,
        )
        for (a, b), part in zip(spans, came, strict=True):
            out[:, a:b] = part
    return out


def _rounds(spans: Sequence[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Return the parts of the ranks' spans that travel in each round, `most` at a time; some end with empty parts."""
    most = max(1, most)
    for at in range(0, max(hi - lo for lo, hi in spans), most):
        yield [(min(lo + at, hi), min(lo + at + most, hi)) for lo, hi in spans]


def _swapped(pieces: Sequence[Tensor], shapes: Sequence[tuple[int, int]], group: comm.Group) -> list[Tensor]:
    """Send matrix r to rank r, for each r, and return the matrices that came, of these shapes. One's own stays."""
    others = [r for r in range(group.size) if r != group.rank]
    sent = torch.cat([pieces[r].flatten() for r in others])
    counts = [0 if r == group.rank else a * b for r, (a, b) in enumerate(shapes)]
    received = sent.new_empty(sum(counts))
    send = [0 if r == group.rank else 2 * p.numel() for r, p in enumerate(pieces)]
    out, x = (torch.view_as_real(t).flatten() for t in (received, sent))
    comm.all_to_all_into(out, x, replace(group, axis="grid"), send, [2 * n for n in counts])
    parts = received.split(counts)
    return [pieces[r] if r == group.rank else parts[r].view(shapes[r]) for r in range(group.size)]
