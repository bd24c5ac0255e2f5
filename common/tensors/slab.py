"""A two-dimensional transform of a matrix that is split by rows, in blocks that stay in cache.

    rows of some 64 are transformed, and written transposed into what travels      no pass over memory of their own
    one exchange
    columns of some 64 are joined from all ranks' parts and transformed            they lie as rows, one after the other

The result is split by columns, and each column lies in one run of memory, so `local` is a transposed view. Natural
order takes the same steps once more, without a transform. The kernel is pocketfft as SciPy has it, which transforms
several rows at once by vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import scipy.fft
import torch
from torch import Tensor

from common import comm
from common.tensors.layout import Layout, Shard
from common.tensors.tensor import DistributedTensor

BLOCK = 2**17  # numbers that are transformed at a time
GAP = 8  # numbers between rows: columns of a power of two apart would share a few lines of the cache


def fits(x: DistributedTensor) -> bool:
    """Return True for a matrix of complex numbers on CPUs, split by rows over one axis, without a gradient."""
    plain = x.ndim == 2 and x.dtype.is_complex and x.device.type == "cpu" and x.local.is_contiguous()
    graded = torch.is_grad_enabled() and x.requires_grad
    by_rows = len(x.grid.shape) == 1 and len(x.layout.cut_along(0)) == 1
    return plain and by_rows and not graded and min(x.shape) >= x.grid.world.size > 1


def slab(x: DistributedTensor, kind: str, norm: str, order: str) -> DistributedTensor:
    """Return fft2 or ifft2 of a matrix for which `fits` is True. kind: fft or ifft."""

    def kernel(block: Tensor) -> None:
        made = getattr(scipy.fft, kind)(block.numpy(), norm=norm, overwrite_x=True, workers=1)
        if made.ctypes.data != block.data_ptr():  # not made in place
            block.copy_(torch.from_numpy(made))

    rows, columns = x.layout, x.layout.placed(Shard(1))
    c_JM = turned(x.local, rows, columns, kernel, kernel)
    if order == "transposed":
        return DistributedTensor(c_JM.T, columns)
    flipped = Layout.of(x.grid, tuple(reversed(x.shape)), Shard(0))
    back = Layout.of(x.grid, flipped.shape, Shard(1, tuple(hi - lo for (lo, hi), _ in rows.boxes)))
    return DistributedTensor(turned(c_JM, flipped, back), rows)


def turned(
    x_mN: Tensor,
    rows: Layout,
    columns: Layout,
    before: Callable[[Tensor], None] | None = None,
    after: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return this rank's columns of a matrix, transposed, from its rows.

    before, after: change blocks of rows, and of columns, in place.
    """
    group, me = rows.grid.world, rows.grid.world.rank
    m, own = x_mN.shape[0], columns.mine[1]
    cuts = [box[1] for box in columns.boxes]
    heights = [hi - lo for (lo, hi), _ in rows.boxes]
    others = [r for r in range(group.size) if r != me]
    to = [0 if r == me else (cuts[r][1] - cuts[r][0]) * m for r in range(group.size)]
    came = [0 if r == me else (own[1] - own[0]) * heights[r] for r in range(group.size)]
    sent, received = x_mN.new_empty(sum(to)), x_mN.new_empty(sum(came))
    parts = dict(zip(others, sent.split([to[r] for r in others]), strict=True))
    parts[me] = x_mN.new_empty((own[1] - own[0]) * m)
    N = x_mN.shape[1]
    step = max(1, BLOCK // max(1, N))
    work = x_mN.new_empty(step, N + GAP)[:, :N]
    for lo in range(0, m, step):
        block = x_mN[lo : lo + step]
        if before is not None:
            block = work[: len(block)].copy_(block)
            before(block)
        for r, part in parts.items():
            begin, end = cuts[r]
            part.view(end - begin, m)[:, lo : lo + step].copy_(block[:, begin:end].T)
    rows.grid.meet()
    pairs = [torch.view_as_real(t).view(-1) for t in (received, sent)]
    send, receive = ([2 * n for n in counts] for counts in (to, came))
    comm.all_to_all_into(pairs[0], pairs[1], replace(group, axis="grid"), send, receive)
    found = dict(zip(others, received.split([came[r] for r in others]), strict=True))
    found[me] = parts[me]
    width, height = own[1] - own[0], sum(heights)
    out = x_mN.new_empty(width, height)
    step = max(1, BLOCK // max(1, height))
    for lo in range(0, width, step):
        target = out[lo : lo + step]
        torch.cat(
            [found[r].view(width, heights[r])[lo : lo + step] for r in range(group.size)], 1, out=target
        )
        if after is not None:
            after(target)
    return out
