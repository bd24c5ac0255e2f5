"""Plumbing of dp_compression.py: options, and the exchange that keeps each parameter's error around a compressor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from common import comm
from common.comm import Group, Pending
from common.comm.checked import own
from common.launch.command_line import Within

from dp_basic import Bucket
from dp_training import DataParallelOptions

COMPRESSORS = ("top-k", "powersgd", "sign")
VERSIONS = ("bucketed", *COMPRESSORS, "ddp-top-k", "ddp-powersgd", "ddp-sign", "torch-powersgd")


@dataclass
class CompressionOptions(DataParallelOptions):
    """Options of the compressors."""

    k: Annotated[float, Within(1e-9, 1)] = 0.05
    """Fraction of the numbers that top-k sends."""
    rank: Annotated[int, Within(1, 65536)] = 2
    """Rank of PowerSGD's factors."""
    curve_steps: Annotated[int, Within(10, 10**9)] = 100
    """With --plot: number of steps of the loss curves."""
    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""


def compressor_of(name: str) -> str:
    """Return the compressor of a version: one of COMPRESSORS, or bucketed."""
    return name.removeprefix("ddp-").removeprefix("torch-")


Views = dict[int, Tensor]  # by parameter index
Told = Callable[[], tuple[Views, Views]]  # completes the messages; (own decompressed message, sum over ranks)


@dataclass
class Message:
    """Exchange in flight; `wait` completes it."""

    wait: Callable[[], None]


class Compressor(ABC):
    """Exchange of a DataParallel: adds the error memory, compresses, and keeps the new error.

        dp = DataParallel(model, group, exchange=TopK(group, share=0.01))

    The memory is kept per parameter, not per bucket, since buckets are cut anew after the first step. One
    object serves one model.
    """

    def __init__(self, group: Group, feedback: bool = True) -> None:
        self.group, self.feedback = group, feedback
        self.memory: Views = {}
        self.used: Tensor | None = None
        self.flags: Pending | None = None

    @abstractmethod
    def send(self, x: Views) -> Told:
        """Compress x, all of one dtype; return a function that completes the exchange.

        Messages may be started here, or only by the returned function.
        """

    @abstractmethod
    def bytes_of_step(self, parameters: Iterable[Tensor]) -> Fraction:
        """Return the bytes a rank sends for the gradients of these parameters."""

    @torch.no_grad()
    def __call__(self, bucket: Bucket) -> Message:
        """Start the exchange of a bucket. The flags at the end of the last bucket are sent uncompressed."""
        views = {i: own(g) for i, g in bucket.views.items()}
        x = {i: g + self.memory[i] if i in self.memory else g.clone() for i, g in views.items()}
        tail = bucket.flat[sum(g.numel() for g in x.values()) :]
        if tail.numel():
            self.used, self.flags = tail, comm.all_reduce(tail, self.group, async_op=True)
        return Message(partial(self._arrive, bucket, x, self.send(x)))

    @torch.no_grad()
    def _arrive(self, bucket: Bucket, x: Views, told: Told) -> None:
        mine, total = told()
        if self.flags:
            self.flags.wait()
        for i, view in bucket.views.items():
            if self.used is None or self.used[i]:  # else no gradient, and the memory stays
                view.copy_(total[i])
                if self.feedback:
                    self.memory[i] = x[i] - mine[i]


def cut(flat: Tensor, like: Views) -> Views:
    """Return the tensors that lie one after the other in `flat`, with the shapes of those in `like`."""
    pieces = torch.split(flat, [x.numel() for x in like.values()])
    return {i: piece.view(x.shape) for (i, x), piece in zip(like.items(), pieces, strict=True)}
