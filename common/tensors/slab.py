"""Two-dimensional transform of a matrix that is split by rows; the kernels read contiguous numbers only.

    every row is transformed                                       x_mN
    the columns travel, transposed on the way                      x_mN -> x_nM
    every column, a row by now, is transformed                     y_nM
    in natural order the rows travel back, transposed again        y_nM -> y_mN

Sender and receiver exchange views [bands, columns, BAND]. The sender reads the columns of a band of BAND rows; the
receiver writes each of them, BAND numbers, in one run. Between ranks of one host on MPI the bands need no further copy:
the sender transposes while it fills the memory that the ranks share. Rows beyond the last whole band are copied by
torch. With order="transposed" the result stays split by columns, and a column lies in one run of memory: `local` is a
transposed view.

The kernels are torch's, which on x86 are MKL's, or those of pocketfft (Reinecke) in SciPy. On an AMD EPYC (Zen 3)
pocketfft is the faster of the two for long rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common import comm
from common.comm import Group
from common.tensors.layout import Layout, Shard
from common.tensors.rates import Library
from common.tensors.tensor import DistributedTensor
from common.utils.pages import new_result

BAND = 32  # rows: of complex numbers 256 or 512 bytes, which the transport copies in blocks
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


def slab(x: DistributedTensor, kind: str, norm: str, order: str, library: Library) -> DistributedTensor:
    """Return the transform of a matrix for which `fits` is True."""
    rows, columns = layouts(x, kind)
    M = x.shape[0]
    m_spans, n_spans = [box[0] for box in rows.boxes], [box[1] for box in columns.boxes]
    lo, hi = columns.mine[1]
    world = replace(x.grid.world, axis="grid")
    x.grid.meet()
    if len(x.local):
        x_mN = transformed(x.local, kind, norm, library)
    else:  # the kernels refuse empty tensors
        x_mN = x.local.new_empty(rows.local_shape, dtype=x.dtype.to_complex())
    x_nM = new_result((hi - lo, M), x_mN.dtype, x_mN.device, world)
    _turn(x_mN, x_nM, m_spans, n_spans, world)
    del x_mN  # its memory serves the next transform
    y_nM = x_nM
    if len(x_nM):
        y_nM = transformed(x_nM, "fft" if kind == "rfft" else kind, norm, library, in_place=True)
    del x_nM
    if order == "transposed":
        return DistributedTensor(y_nM.T, columns)
    y_mN = new_result(rows.local_shape, y_nM.dtype, y_nM.device, world)
    _turn(y_nM, y_mN, n_spans, m_spans, world)
    return DistributedTensor(y_mN, rows)


def transformed(x: Tensor, kind: str, norm: str, library: Library, in_place: bool = False) -> Tensor:
    """Return the transforms of the rows of x by a library.

    in_place: x may be overwritten, and the result may share its memory. torch's kernels leave x as it is.
    """
    if library == "torch":
        found: Tensor = getattr(torch.fft, kind)(x, norm=norm)
        return found
    from scipy import fft  # imported late: takes half a second

    rows = x.detach().resolve_conj().resolve_neg().numpy()
    threads = torch.get_num_threads()
    return torch.from_numpy(getattr(fft, kind)(rows, norm=norm, overwrite_x=in_place, workers=threads))


def _turn(
    x: Tensor, turned: Tensor, from_spans: Sequence[Span], to_spans: Sequence[Span], world: Group
) -> None:
    """Fill this rank's rows of a transposed matrix. Rank r holds rows from_spans[r] before, to_spans[r] afterwards."""
    pieces = [x[:, slice(*span)] for span in to_spans]
    places = [turned[:, slice(*span)].T for span in from_spans]
    heights = [hi - lo for lo, hi in from_spans]
    if max(heights) >= BAND:
        comm.all_to_all_views(list(map(_bands, places)), list(map(_bands, pieces)), world)
    if any(height % BAND for height in heights):
        comm.all_to_all_views(list(map(_rest, places)), list(map(_rest, pieces)), world)


def _bands(x: Tensor) -> Tensor:
    """Return a view [bands, columns, BAND] of all rows that fill bands."""
    bands = len(x) // BAND
    return x[: bands * BAND].view(bands, BAND, x.shape[1]).transpose(1, 2)


def _rest(x: Tensor) -> Tensor:
    return x[len(x) // BAND * BAND :]
