"""Convolutions split along the batch, the channels of the output or the input, or any spatial dimension with halos.

    y = conv2d(x, weight, bias, padding=1)         # x [N, C, H, W] split along H: each rank gets its neighbours' rows

Split along          x                 weight             y
    the batch        split             whole              split
    H, W or D        split, with halo  whole              split
    output channels  whole             split along O      split along channels
    input channels   split             split along C      terms, which are summed and split

Padding is zeros at the outer borders alone; between ranks lie the neighbours' numbers. Where that is predicted to be
faster, each rank computes its whole result with zeros for the halo while the halo travels, and then adds what the halo
contributes to the border.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm.collectives import linear_map
from common.errors import UsageError
from common.tensors.cost import Cost, Way, choose, moving, received
from common.tensors.halo import Exchange, Halo, sent_back
from common.tensors.layout import Box, Layout, Placement, Replicate, Shard, integers, size_of, together
from common.tensors.rates import Term
from common.tensors.tensor import DistributedTensor, brought, common_grid, describe, settled, to_layout
from common.tensors.transfer import bytes_sent
from common.tensors.window import NAMES, Split, Window, plans_of, split_of

Sizes = int | Sequence[int]
Padding = int | Sequence[int | Sequence[int]]


def conv1d(
    input: DistributedTensor,
    weight: DistributedTensor,
    bias: DistributedTensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    way: str | None = None,
) -> DistributedTensor:
    """Return the convolution of [N, C, L] with [O, C / groups, kL]; see `conv2d`."""
    return _convolve("conv1d", 1, input, weight, bias, stride, padding, dilation, groups, way)


def conv2d(
    input: DistributedTensor,
    weight: DistributedTensor,
    bias: DistributedTensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    way: str | None = None,
) -> DistributedTensor:
    """Return the convolution of [N, C, H, W] with [O, C / groups, kH, kW], plus a bias [O]. Differentiable.

    padding: one number, one for each spatial dimension, or pairs (before, after). Sends the halo, or the operands
    that the chosen way needs elsewhere; the result stays split. Raises UsageError for shapes that do not match.
    """
    return _convolve("conv2d", 2, input, weight, bias, stride, padding, dilation, groups, way)


def conv3d(
    input: DistributedTensor,
    weight: DistributedTensor,
    bias: DistributedTensor | None = None,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    way: str | None = None,
) -> DistributedTensor:
    """Return the convolution of [N, C, D, H, W] with [O, C / groups, kD, kH, kW]; see `conv2d`."""
    return _convolve("conv3d", 3, input, weight, bias, stride, padding, dilation, groups, way)


def _convolve(
    name: str,
    d: int,
    input: DistributedTensor,
    weight: DistributedTensor,
    bias: DistributedTensor | None,
    *rest: Any,
) -> DistributedTensor:
    *numbers, way = rest
    tensors = [x for x in (input, weight, bias) if x is not None]
    grid = common_grid(tensors, name)
    with grid.operation(f"{name}({describe(*tensors)}, {rest})"):
        convolution = Convolution(d, input, weight, bias, *numbers)
        key = (*(x.layout for x in tensors), convolution.window, input.dtype, convolution.graded)
        y = choose(grid, name, convolution.ways(), way, key).run()
        return y if bias is None else _with_bias(y, bias)


def _with_bias(y: DistributedTensor, bias: DistributedTensor) -> DistributedTensor:
    placements: list[Placement] = []
    shared = []
    for axis, p in enumerate(y.placements):
        of_channels = isinstance(p, Shard) and p.dim == 1
        placements.append(Shard(0, p.sizes) if isinstance(p, Shard) and of_channels else Replicate())
        if isinstance(p, Shard) and not of_channels:
            shared.append(axis)
    b_O = brought(bias, Layout.of(y.grid, bias.shape, together(placements)), shared)
    return DistributedTensor(y.local + b_O.view([-1] + [1] * (y.ndim - 2)), y.layout)


class Convolution:
    """A convolution over d spatial dimensions and the ways to split it. Raises UsageError for bad shapes."""

    def __init__(
        self,
        d: int,
        input: DistributedTensor,
        weight: DistributedTensor,
        bias: DistributedTensor | None = None,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> None:
        self.d, self.x, self.w, self.grid = d, input, weight, input.grid
        self.graded = torch.is_grad_enabled() and input.requires_grad
        shown = f"conv{d}d: input {list(input.shape)}, weight {list(weight.shape)}, groups {groups}"
        if input.ndim != d + 2 or weight.ndim != d + 2:
            raise UsageError(f"{shown}: give tensors of {d + 2} dimensions")
        outputs, per_group = weight.shape[:2]
        if groups < 1 or input.shape[1] != per_group * groups or outputs % groups:
            raise UsageError(
                f"{shown}: give a weight [O, {input.shape[1]} / groups, ...] with groups that divide O"
            )
        if bias is not None and tuple(bias.shape) != (outputs,):
            raise UsageError(f"{shown}: the bias has {list(bias.shape)}, needed is [{outputs}]")
        if input.dtype != weight.dtype:
            raise UsageError(f"{shown}: the types {input.dtype} and {weight.dtype} differ")
        self.window = Window(
            tuple(weight.shape[2:]),
            _each(d, stride, "stride", 1),
            _pairs(d, padding),
            _each(d, dilation, "dilation", 1),
            groups,
        )
        w = self.window
        short = [i for i in range(d) if input.shape[2 + i] + sum(w.padding[i]) < w.reach(i) + 1]
        if short or any(k < 1 for k in w.kernel):
            raise UsageError(f"{shown}: the padded input is shorter than the kernel")
        self.spatial = tuple(w.length(i, input.shape[2 + i]) for i in range(d))

    def ways(self) -> list[Way]:
        """Return a way for each choice of what each axis of the grid splits."""
        channels = ("output channels", "input channels") if self.window.groups == 1 else ("groups",)
        every = itertools.product(("batch", *NAMES[self.d], *channels), repeat=len(self.grid.shape))
        return [self.way(" x ".join(names), names) for names in every if names.count("groups") < 2]

    def way(self, name: str, names: Sequence[str]) -> Way:
        """Return the way in which axis i of the grid splits `names[i]`."""

        def cost() -> Cost:
            split, item = self.split(names), self.x.dtype.itemsize
            halo, y = split.halo, split.y
            moves = ((self.x.layout, split.x), (self.w.layout, split.w), (y, settled(y)))
            terms = [term for move in moves for term in moving(*move, self.x.dtype)]
            plan = min(self._plans(split), key=self.grid.rates.predict)
            terms += plan
            memory = sum(received(*move, self.x.dtype) for move in moves) + y.largest * item
            memory += max(size_of(box) for box in halo.boxes) * item if halo.moves else 0
            sent = sum((bytes_sent(*move, item) for move in moves), halo.bytes_sent(item))
            return Cost(tuple(terms), memory, Fraction(sent))

        def run() -> DistributedTensor:
            split = self.split(names)
            w = brought(
                self.w, split.w, [i for i, s in enumerate(names) if s == "batch" or s in NAMES[self.d]]
            )
            x = brought(self.x, split.x, [i for i, s in enumerate(names) if s == "output channels"])
            return to_layout(DistributedTensor(self.local(x, w, split), split.y), settled(split.y))

        return Way(name, run, cost)

    def split(self, names: Sequence[str]) -> Split:
        """Return how the tensors lie if axis i of the grid splits `names[i]`."""
        return split_of(self.x.layout, self.w.layout, self.window, self.spatial, tuple(names))

    def local(self, x: Tensor, w: Tensor, split: Split, overlapped: bool | None = None) -> Tensor:
        """Return this rank's part of the result from its piece of x, bringing the halo.

        overlapped: compute the interior while the halo travels; default: where that is predicted to be faster.
        """
        halo, out = split.halo, split.y.mine
        groups = max(1, x.shape[1] // max(1, w.shape[1])) if self.window.groups > 1 else 1
        needed = halo.boxes[self.grid.world.rank]
        able = len(self._plans(split)) > 1 and size_of(out) * size_of(needed) * w.numel()
        if able and (self._saves_time(split) if overlapped is None else overlapped):
            return self._overlapped(x, w, halo, out, groups)
        if halo.moves or needed != split.x.mine:
            x = linear_map(x, lambda x: Exchange(x, halo).box(needed), lambda dy: sent_back(dy, halo))
        return self._apply(x, w, out, groups)

    def _plans(self, split: Split) -> list[list[Term]]:
        """Return the terms of each order of halo and interior; with a gradient the halo always comes first."""
        plans = plans_of(split, self.x.dtype)
        return plans[:1] if self.graded else plans

    def _saves_time(self, split: Split) -> bool:
        """Return True if overlap is predicted to be faster; by the grid's rates, predicted once for each split."""
        known, order = (split, self.x.dtype), ("halo first", "overlapped")
        if known not in self.grid.chosen:
            first, meanwhile = map(self.grid.rates.predict, plans_of(*known))
            self.grid.chosen[known] = order[meanwhile < first]
        return self.grid.chosen[known] == "overlapped"

    def _kernel(self, x: Tensor, w: Tensor, padding: list[int], groups: int) -> Tensor:
        function: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[self.d - 1]
        return function(x, w, None, self.window.stride, padding, self.window.dilation, groups)

    def _apply(
        self,
        x: Tensor,
        w: Tensor,
        out: Box,
        groups: int,
        box: Box | None = None,
        window: Window | None = None,
    ) -> Tensor:
        """Return the outputs `out` from the box of the input that they need, which is x; zeros for what lies beyond.

        box: that x holds instead. window: the window of w, if w is only some taps of the weight.
        """
        window = window or self.window
        if not size_of(out) or not x.numel() or not w.numel():  # no term, but a history
            return x.new_zeros([hi - lo for lo, hi in out]) + 0 * (x.sum() + w.sum())
        zeros = []
        for i, n in enumerate(self.x.shape[2:]):
            (begin, end), (before, after) = window.needed(i, *out[2 + i], n)
            lo, hi = box[2 + i] if box else (begin, end)
            zeros.append((lo - begin + before, end + after - hi))
        if all(before == after >= 0 for before, after in zeros):
            return self._kernel(x, w, [before for before, _ in zeros], groups)
        return self._kernel(F.pad(x, [n for pair in reversed(zeros) for n in pair]), w, [0] * self.d, groups)

    def _overlapped(self, x: Tensor, w: Tensor, halo: Halo, out: Box, groups: int) -> Tensor:
        """Return the result, of which the interior is computed while the halo travels.

        With zeros in place of the halo all outputs are computed in one call. Then the halo's contribution is added to
        those at the ends: its product with the taps of the kernel that reach it.
        """
        exchange = Exchange(x, halo)
        here, box = halo.source.mine, halo.boxes[self.grid.world.rank]
        changed = [i for i in range(self.d) if box[2 + i] != here[2 + i]]
        if len(changed) != 1 or not w.sum().isfinite():  # an infinite weight times zero is no number
            return self._apply(exchange.box(box), w, out, groups)
        [i] = changed
        dim, window = 2 + i, self.window
        (first, last), (top, bottom) = out[dim], here[dim]
        lo, hi = self._interior(i, out[dim], here[dim])
        if lo >= hi:
            return self._apply(exchange.box(box), w, out, groups)
        y = self._apply(x, w, out, groups, here)
        exchange.wait()

        def cut(of: Box, begin: int, end: int) -> Box:
            return (*of[:dim], (begin, end), *of[dim + 1 :])

        above = (first, lo), (0, window.taps_before(i, first, top)), (box[dim][0], top)
        below = (hi, last), (window.taps_before(i, last - 1, bottom), window.kernel[i]), (bottom, box[dim][1])
        for outputs, taps, rows in (above, below):
            if outputs[0] < outputs[1]:
                part, beyond = cut(out, *outputs), cut(box, *rows)
                some = w.narrow(dim, taps[0], taps[1] - taps[0])
                border = y.narrow(dim, outputs[0] - first, outputs[1] - outputs[0])
                border += self._apply(
                    exchange.box(beyond), some, part, groups, beyond, window.of_taps(i, *taps)
                )
        return y

    def _interior(self, i: int, out: tuple[int, int], here: tuple[int, int]) -> tuple[int, int]:
        """Return [lo, hi) of the outputs that need only inputs of this rank."""
        n = self.x.shape[2 + i]
        lo, hi = out
        while lo < hi and self.window.needed(i, lo, lo + 1, n)[0][0] < here[0]:
            lo += 1
        while hi > lo and self.window.needed(i, hi - 1, hi, n)[0][1] > here[1]:
            hi -= 1
        return lo, hi


def _each(d: int, given: Sizes, name: str, least: int) -> tuple[int, ...]:
    found = tuple(integers(given, name)) * (1 if np.iterable(given) else d)
    if len(found) != d or min(found) < least:
        raise UsageError(f"{name}={given}: give one number or {d}, at least {least}")
    return found


def _pairs(d: int, padding: Padding) -> tuple[tuple[int, int], ...]:
    """Return the zeros before and after each dimension."""
    given: Any = padding if np.iterable(padding) else [padding] * d
    found = [integers(p, "padding") for p in given]
    if len(found) != d or any(not 0 < len(p) <= 2 or min(p) < 0 for p in found):
        raise UsageError(
            f"padding={padding}: give one number, or a list with a number or a pair (before, after) for each of "
            f"{d} dimension(s), none negative"
        )
    return tuple((p[0], p[-1]) for p in found)
