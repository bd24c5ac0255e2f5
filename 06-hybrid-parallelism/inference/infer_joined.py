"""Weights as decoding reads them: in large pages of memory, and projections of one input as a single product.

    q = x Wq^T   k = x Wk^T   v = x Wv^T         [q | k | v] = x [Wq; Wk; Wv]^T

With one token per sequence a product takes the time in which its matrix is read, and each call has a start. The first
projection that sees an input computes all of them, and the others take their columns; their weights are rows of the
joined matrix, so the memory stays the same. In training this would save little, as products are long.

A processor looks up each page of memory in a small table. A weight of 12 MB has 3072 pages of 4 KiB or 6 of 2 MiB, and
is read some 5 % faster from the large ones.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.utils.pages import in_large_pages


class Joined:
    """Projections that are always applied to the same input, in turn."""

    def __init__(self, *projections: nn.Module) -> None:
        weights = [p.get_parameter("weight").detach() for p in projections]
        biases = [p.get_parameter("bias").detach() for p in projections if p.bias is not None]
        self.sizes = [len(weight) for weight in weights]
        self.weight, self.bias = in_large_pages(torch.cat(weights)), torch.cat(biases) if biases else None
        for i, (projection, rows) in enumerate(zip(projections, self.weight.split(self.sizes), strict=True)):
            projection.weight = nn.Parameter(rows, False)
            projection.product = partial(self.take, i)  # type: ignore[assignment]
        self.x: Tensor | None = None

    def take(self, i: int, x: Tensor, *_: Tensor | None) -> Tensor:
        """Return the product of projection i."""
        if x is not self.x:
            self.x, self.found = x, F.linear(x, self.weight, self.bias).split_with_sizes(self.sizes, -1)
        found: Tensor = self.found[i]
        return found
