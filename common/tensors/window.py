"""Layouts of a convolution's tensors for each way to split it, and the numbers that a rank needs of its neighbours.

output   0 1 2 3 | 4 5 6 7        kernel 3, padding 1: outputs 0 to 3 need inputs -1 to 4, of which -1 is a zero and
input  . 0 1 2 3 4 | ...          4 lies on the next rank
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from common.comm import sizes_of
from common.tensors.grid import Grid, cached_on_grid
from common.tensors.halo import Halo
from common.tensors.layout import Box, Layout, Partial, Placement, Replicate, Shard, size_of, together
from common.tensors.rates import Term

NAMES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


@dataclass(frozen=True)
class Window:
    """The numbers of a convolution over `d` spatial dimensions, one entry each; padding: (before, after)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def reach(self, i: int) -> int:
        """Return the distance between the first and the last input of one output."""
        return self.dilation[i] * (self.kernel[i] - 1)

    def length(self, i: int, n: int) -> int:
        """Return the length of the output for an input of length n."""
        return max(0, (n + sum(self.padding[i]) - self.reach(i) - 1) // self.stride[i] + 1)

    def needed(self, i: int, lo: int, hi: int, n: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return [begin, end) of the input that outputs lo to hi need, and the zeros before and after it."""
        if hi <= lo:
            return (0, 0), (0, 0)
        first = lo * self.stride[i] - self.padding[i][0]
        last = (hi - 1) * self.stride[i] - self.padding[i][0] + self.reach(i) + 1
        begin, end = min(max(0, first), n), max(min(n, last), 0)
        end = max(begin, end)
        return (begin, end), (begin - first, last - end)

    def taps_before(self, i: int, output: int, end: int) -> int:
        """Return how many taps of the kernel an output multiplies by inputs before `end`."""
        first = output * self.stride[i] - self.padding[i][0]
        return min(self.kernel[i], max(0, -((first - end) // self.dilation[i])))

    def of_taps(self, i: int, tap: int, stop: int) -> Window:
        """Return the window of the taps [tap, stop) of the kernel, for what they contribute to the outputs."""
        kernel, padding = list(self.kernel), list(self.padding)
        kernel[i] = stop - tap
        padding[i] = padding[i][0] - tap * self.dilation[i], padding[i][1]
        return replace(self, kernel=tuple(kernel), padding=tuple(padding))


@dataclass(frozen=True, eq=False)
class Split:
    """Layouts of the input, before its halo, of the weight and of the result, and the halo."""

    window: Window
    x: Layout
    w: Layout
    y: Layout
    halo: Halo

    @property
    def grid(self) -> Grid:
        return self.x.grid


@cached_on_grid
def split_of(x: Layout, w: Layout, window: Window, spatial: tuple[int, ...], names: tuple[str, ...]) -> Split:
    """Return the split in which axis i of the grid splits `names[i]`; x, w: as the operands lie before."""
    grid, placed = x.grid, (list[Placement](), list[Placement](), list[Placement]())
    for axis, name in enumerate(names):
        given = x.placements[axis]
        for placements, p in zip(
            placed, _placements(window, given, x, w, name, grid.shape[axis]), strict=True
        ):
            placements.append(p)
    shapes = (x.shape, w.shape, (x.shape[0], w.shape[0], *spatial))
    for_x, for_w, y = (Layout.of(grid, shape, together(p)) for shape, p in zip(shapes, placed, strict=True))
    boxes: list[Box] = []
    for rank, out in enumerate(y.boxes):
        inner = [window.needed(i, *out[2 + i], n)[0] for i, n in enumerate(x.shape[2:])]
        boxes.append((*for_x.box(rank)[:2], *inner))
    return Split(window, for_x, for_w, y, Halo(for_x, tuple(boxes)))


@cached_on_grid
def plans_of(split: Split, dtype: torch.dtype) -> list[list[Term]]:
    """Return the terms of the rank that has most to do: if the halo comes first, and, if it can, travels meanwhile."""
    world, kernel = range(len(split.y.boxes)), math.prod(split.window.kernel)
    shares = []
    for r in world:
        images, made, *places = (hi - lo for lo, hi in split.y.box(r))
        given = split.w.box(r)[1][1] - split.w.box(r)[1][0]
        groups = max(1, split.window.groups * made // max(1, split.w.shape[0]))
        shares.append((images * groups, given, made // groups, math.prod(places), kernel))
    most = max(shares, key=math.prod)
    convolution = Term("convolution", most, dtype)
    if not split.halo.moves:
        return [[convolution]]
    came = [[part for owner, part in split.halo.owners[r] if owner != r] for r in world]
    exchange = max(int(split.halo.bytes_sent(dtype.itemsize, r)) for r in world), 2
    boxed = max(map(size_of, split.halo.boxes)) * dtype.itemsize
    before = [Term("exchange", exchange), Term("copy", (2 * boxed,)), convolution]
    if dtype.itemsize < 4:  # of these the sum of two parts would be rounded once more
        return [before]
    images, given, made, *_ = most
    ends, beyond = max(map(len, came)), max(sum(map(size_of, parts)) for parts in came)
    border = images, given, made, -(-beyond // max(1, images * given * ends)), kernel
    added = max(sum(_in_lines(part, dtype.itemsize) for part in parts) for parts in came)
    added = 2 * added * made // max(1, given)  # read and written
    meanwhile = Term("exchange", exchange, hidden=True)
    return [
        before,
        [meanwhile, convolution, Term("convolution", border, dtype, ends), Term("copy", (added,))],
    ]


def _in_lines(box: Box, item: int) -> int:
    """Return the bytes of the cache lines that a box lies in."""
    run = max(1, box[-1][1] - box[-1][0])
    return size_of(box) // run * -(-run * item // 64) * 64


def _placements(
    window: Window, given: Placement, x: Layout, w: Layout, name: str, ranks: int
) -> tuple[Placement, Placement, Placement]:
    """Return how an axis of so many ranks cuts x, w and y; given: how it cuts x before."""
    if name == "output channels":
        return Replicate(), Shard(0), Shard(1)
    if name == "input channels":
        return Shard(1), Shard(1), Partial()
    if name == "groups":
        sizes = sizes_of(window.groups, ranks)
        per_x, per_w = x.shape[1] // window.groups, w.shape[0] // window.groups
        of_x, of_w = (tuple(per * s for s in sizes) for per in (per_x, per_w))
        return Shard(1, of_x), Shard(0, of_w), Shard(1, of_w)
    dim = 0 if name == "batch" else 2 + NAMES[len(window.kernel)].index(name)
    kept = given if isinstance(given, Shard) and given.dim == dim else Shard(dim)
    return kept, Replicate(), kept if dim == 0 else Shard(dim)
