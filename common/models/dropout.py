"""Dropout that asks where a number is, not when it is drawn.

    keep(sample b, position s, feature d)  =  bits(seed, step, name of the layer; b, s, d)  >=  p 2^64

A generator's state says how many numbers were drawn before, and that differs from rank to rank. A function of the place
does not: whoever holds an element draws the same bit for it. What is replicated is dropped alike on all ranks, what is
split is dropped as one device would, and a checkpointed layer that runs again drops the same, as long as it does so
before the next micro-batch. Megatron-LM keeps two
generators for the first two (Narayanan et al., "Efficient large-scale language model training", 2021, section 3).

The bits are those of random.py's splitmix64, folded over the coordinates one dimension after the other, so that only
the last fold is as large as the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from common import random


def _signed(number: int) -> int:
    """The 64-bit pattern as torch's int64."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def _mix(z: Tensor) -> Tensor:
    """`random.mix` on int64 tensors; torch shifts the sign in from the left, the masks take it away."""
    z = z ^ ((z >> 30) & (2**34 - 1))
    z = z * _signed(0xBF58476D1CE4E5B9)
    z = z ^ ((z >> 27) & (2**37 - 1))
    z = z * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))


def kept(p: float, key: int, places: list[Tensor]) -> Tensor:
    """Which elements stay: a bool tensor with one dimension for each of `places`, the indices along it.

    Each index keeps its element with probability 1 - p, independently of all others.
    """
    bits = torch.tensor(_signed(key), device=places[0].device)
    for place in places:
        bits = _mix(bits[..., None] + (place + 1) * _signed(random.GOLDEN))
    return ((bits >> 1) & (2**63 - 1)) >= int(p * 2**63)


class Dropout(nn.Module):
    """x with a share p of its elements set to zero and the rest divided by 1 - p, in training.

    The model names its dropouts; the training step says which `step` it is and which sample of the global batch is the
    first one here. A strategy that splits a dimension says where this rank's part lies: `first_head`, or `slice` of
    the positions.
    """

    def __init__(self, p: float, seed: int = 0) -> None:
        super().__init__()
        self.p, self.seed, self.name = p, seed, ""
        self.step = self.first_sample = self.first_head = 0
        self.slice: Callable[[Tensor], Tensor] = lambda positions: positions

    @property
    def active(self) -> bool:
        """Does it drop anything?"""
        return self.training and self.p > 0

    def forward(self, x: Tensor, positions_S: Tensor) -> Tensor:
        """x_BSD, or attention weights x_BHST, whose rows and columns are positions."""
        if not self.active:
            return x
        samples = self.first_sample + torch.arange(x.shape[0], device=x.device)
        if x.ndim == 3:
            places = [samples, self.slice(positions_S), torch.arange(x.shape[2], device=x.device)]
        else:
            heads = self.first_head + torch.arange(x.shape[1], device=x.device)
            places = [samples, heads, positions_S, positions_S]
        key = int(random.bits(self.seed, random.stream_of("dropout." + self.name), self.step)[0])
        return x * kept(self.p, key, places) / (1 - self.p)
