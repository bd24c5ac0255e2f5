"""Two-dimensional transform of a matrix that is split by rows; the kernels read contiguous numbers only.

    rows are transformed, and the columns travel, transposed on the way                    x_mN -> x_nM
    columns, which are rows now, are transformed; in natural order the rows travel back    x_nM -> y_mN

The matrix has M rows and N columns, of which each rank holds m or n. Each rank transforms one band of its rows and
sends it before it transforms the next, so that the exchange reads the band from the cache. For the same reason the
kernels read a copy of the band, see `transformed`.

Sender and receiver exchange views [blocks, columns, BLOCK]. The sender reads the columns of a block of BLOCK rows; the
receiver writes each of them, BLOCK numbers, in one run. Between ranks of one host on MPI the blocks need no further
copy: the sender transposes while it fills the memory that the ranks share. Rows beyond the last whole block are copied
by torch. With order="transposed" the result stays split by columns, and a column lies in one run of memory: `local` is
a transposed view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common import comm
from common.comm import Group
from common.tensors.layout import Layout, Shard
from common.tensors.tensor import DistributedTensor
from common.utils.pages import new_result

BAND = 2**21  # bytes of a band; with its transform it fits into the last cache, unless 32 rows take more
BLOCK = 32  # rows: of complex numbers 256 or 512 bytes, which the transport copies in blocks
Span = tuple[int, int]
KINDS = "fft", "ifft", "rfft"


def fits(x: DistributedTensor, kind: str) -> bool:
    """Return True for fft, ifft and rfft of a matrix on CPUs, split by rows over one axis, without a gradient."""
    known = kind == "rfft" or (kind in KINDS and x.dtype.is_complex)
    plain = x.ndim == 2 and x.device.type == "cpu" and not (torch.is_grad_enabled() and x.requires_grad)
    by_rows = len(x.grid.shape) == 1 and len(x.layout.cut_along(0)) == 1
    return known and plain and by_rows and min(x.shape) >= x.grid.world.size > 1


def layouts(x: DistributedTensor, kind: str) -> tuple[Layout, Layout]:
    """Return how the result lies in natural order, split by rows, and transposed, split by columns."""
    N = x.shape[1] // 2 + 1 if kind == "rfft" else x.shape[1]
    rows = Layout.of(x.grid, (x.shape[0], N), x.placements)
    return rows, rows.placed(Shard(1))


def slab(x: DistributedTensor, kind: str, norm: str, order: str) -> DistributedTensor:
    """Return the transform of a matrix [M, N] for which `fits` is True; for rfft [M, N // 2 + 1].

    It lies as x does in natural order, split by columns in transposed order, where `local` is a transposed view.
    """
    rows, columns = layouts(x, kind)
    m_spans, n_spans = [box[0] for box in rows.boxes], [box[1] for box in columns.boxes]
    world, M = replace(x.grid.world, axis="grid"), x.shape[0]
    x.grid.meet()
    x_nM = _turned(x.local, kind, norm, m_spans, n_spans, world)
    kind = "fft" if kind == "rfft" else kind
    if order == "natural":
        return DistributedTensor(_turned(x_nM, kind, norm, n_spans, m_spans, world), rows)
    height = height_of(M, x_nM.element_size())
    for first in range(0, len(x_nM), height):
        band = x_nM[first : first + height]
        band.copy_(transformed(band, kind, norm))
    return DistributedTensor(x_nM.T, columns)


def height_of(length: int, item: int) -> int:
    """Return how many rows of numbers of `item` bytes are transformed at once: whole blocks, at least one."""
    return max(1, BAND // (length * item * BLOCK)) * BLOCK


def transformed(x: Tensor, kind: str, norm: str) -> Tensor:
    """Return the transforms of the rows of a band [rows, N]; for rfft [rows, N // 2 + 1].

    The kernels do not read their input in the order of memory. A copy does, and brings it into the cache faster.
    """
    cached = x.detach().clone(memory_format=torch.contiguous_format)
    found: Tensor = getattr(torch.fft, kind)(cached, norm=norm)
    return found


def _turned(
    x: Tensor,
    kind: str,
    norm: str,
    from_spans: Sequence[Span],
    to_spans: Sequence[Span],
    world: Group,
) -> Tensor:
    """Transform the rows x [m, N] band by band; return this rank's rows [n, M] of the transposed matrix.

    Rank r holds from_spans[r] of the M rows before, and to_spans[r] of the transposed matrix's rows afterwards: N, or
    N // 2 + 1 for rfft.
    """
    lo, hi = to_spans[world.rank]
    length, wide = to_spans[-1][1], x.dtype.to_complex()
    turned = new_result((hi - lo, from_spans[-1][1]), wide, x.device, world)
    height = height_of(x.shape[1], x.element_size())
    empty = x.new_empty((0, length), dtype=wide)  # torch.fft refuses a band without rows
    for first in range(0, max(end - begin for begin, end in from_spans), height):
        spans = [(min(begin + first, end), min(begin + first + height, end)) for begin, end in from_spans]
        rows = x[first : first + height]
        _turn(transformed(rows, kind, norm) if len(rows) else empty, turned, spans, to_spans, world)
    return turned


def _turn(
    x: Tensor, turned: Tensor, from_spans: Sequence[Span], to_spans: Sequence[Span], world: Group
) -> None:
    """Send the rows x of a band, and write those of rank r to columns from_spans[r] of `turned`."""
    pieces = [x[:, slice(*span)] for span in to_spans]
    places = [turned[:, slice(*span)].T for span in from_spans]
    heights = [hi - lo for lo, hi in from_spans]
    if max(heights) >= BLOCK:
        comm.all_to_all_views(list(map(_blocks, places)), list(map(_blocks, pieces)), world)
    if any(height % BLOCK for height in heights):
        comm.all_to_all_views(list(map(_rest, places)), list(map(_rest, pieces)), world)


def _blocks(x: Tensor) -> Tensor:
    """Return a view [blocks, columns, BLOCK] of all rows that fill blocks."""
    blocks = len(x) // BLOCK
    return x[: blocks * BLOCK].view(blocks, BLOCK, x.shape[1]).transpose(1, 2)


def _rest(x: Tensor) -> Tensor:
    return x[len(x) // BLOCK * BLOCK :]
