"""Terms of an operation, and the seconds that a rank of this machine needs for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Term:
    """One step of a way on the rank that has most to do.

    kind and sizes:

        product      (batch, m, k, n)       batched matrix product
        convolution  (FLOPs,)               of which a multiplication and an addition count two
        transform    (rows, length)         complex Fourier transforms
        copy         (bytes,)               read and written in memory, each byte counted once
        exchange     (bytes sent, messages) all-to-all, halos, shifts between neighbours
        all-gather   (bytes sent,)
        reduce-scatter  (bytes sent,)
        all-reduce   (bytes sent,)
    """

    kind: str
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    times: int = 1
    hidden: bool = False
    """True if it travels while the way's arithmetic goes on."""


@dataclass(frozen=True)
class Rates:
    """What a rank computes and sends in a second, the same on all ranks.

    memory: bytes that an operation may need beyond its operands, per rank.
    """

    flops: float = 50e9
    copy: float = 8e9
    bandwidth: float = 5e9
    latency: float = 20e-6
    memory: float = math.inf

    def seconds(self, term: Term) -> float:
        """Return the predicted seconds of a term."""
        item = term.dtype.itemsize
        if term.kind == "product":
            b, m, k, n = term.sizes
            words = 4 if term.dtype.is_complex else 1
            one = 2 * b * m * k * n * words / self.flops * (item / words / 4)
            one += b * (m * k + k * n + m * n) * item / self.copy
        elif term.kind == "convolution":
            one = term.sizes[0] / self.flops * (item / 4)
        elif term.kind == "transform":
            rows, length = term.sizes
            one = 5 * rows * length * math.log2(max(length, 2)) / (self.flops / 8)
        elif term.kind == "copy":
            one = term.sizes[0] / self.copy
        else:
            one = self.latency + term.sizes[0] / self.bandwidth
        return term.times * one

    def predict(self, terms: Sequence[Term]) -> float:
        """Return the predicted seconds of an operation; what travels meanwhile counts beyond the arithmetic."""
        hidden = sum(self.seconds(t) for t in terms if t.hidden)
        arithmetic = {"product", "convolution", "transform"}
        shown = [t for t in terms if not t.hidden]
        work = sum(self.seconds(t) for t in shown if t.kind in arithmetic)
        rest = sum(self.seconds(t) for t in shown if t.kind not in arithmetic)
        return rest + max(work, hidden)
