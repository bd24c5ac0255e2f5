"""Dropout as a function of an element's position, without a generator's state.

    keep(sample b, position s, feature d)  =  bits(seed, step, name of the layer; b, s, d)  >=  p 2^64

A generator's state depends on the count of earlier draws, which differs from rank to rank. A function of the
position does not: every rank that holds an element draws the same bit for it. Replicated tensors are dropped
alike on all ranks, split tensors as on one device, and a checkpointed layer drops the same elements again in
its recomputation, if that precedes the next micro-batch. Megatron-LM keeps two generators for the first two
cases (Narayanan et al., "Efficient large-scale language model training", 2021, section 3).

The bits are those of random.py's splitmix64, folded over the coordinates one dimension after the other, so that only
the last fold is as large as the tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common import random


def _signed(number: int) -> int:
    """Return the 64-bit pattern as torch's int64."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def _mix(z: Tensor) -> Tensor:
    """`random.mix` on int64 tensors. torch shifts in copies of the sign bit, which the masks remove."""
    z = z ^ ((z >> 30) & (2**34 - 1))
    z = z * _signed(0xBF58476D1CE4E5B9)
    z = z ^ ((z >> 27) & (2**37 - 1))
    z = z * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & (2**33 - 1))


def kept(p: float, key: int, places: list[Tensor]) -> Tensor:
    """Return a bool tensor, True for elements that stay; one dimension per tensor of indices in `places`.

    Each index keeps its element with probability 1 - p, independently of all others.
    """
    bits = torch.tensor(_signed(key), device=places[0].device)
    for place in places:
        bits = _mix(bits[..., None] + (place + 1) * _signed(random.GOLDEN))
    return ((bits >> 1) & (2**63 - 1)) >= int(p * 2**63)


class Dropout(nn.Module):
    """Dropout: in training sets a share p of the elements of x to zero and divides the rest by 1 - p.

    The model sets `name`; the training step sets `step` and `first_sample`, the number of this rank's first
    sample in the global batch. A strategy that splits the heads sets `first_head`, that of this rank's part; one that
    splits the sequence calls with the positions of this rank's part.
    """

    def __init__(self, p: float, seed: int = 0) -> None:
        super().__init__()
        self.p, self.seed, self.name = p, seed, ""
        self.step = self.first_sample = self.first_head = 0

    @property
    def active(self) -> bool:
        """True in training, if p is above 0."""
        return self.training and self.p > 0

    def forward(self, x: Tensor, positions_S: Tensor) -> Tensor:
        """Drop elements of x_BSD, or of attention weights x_BHST, whose rows and columns are positions."""
        if not self.active:
            return x
        samples = self.first_sample + torch.arange(x.shape[0], device=x.device)
        if x.ndim == 3:
            places = [samples, positions_S, torch.arange(x.shape[2], device=x.device)]
        else:
            heads = self.first_head + torch.arange(x.shape[1], device=x.device)
            places = [samples, heads, positions_S, positions_S]
        key = int(random.bits(self.seed, random.stream_of("dropout." + self.name), self.step)[0])
        return x * kept(self.p, key, places) / (1 - self.p)
