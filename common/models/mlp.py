"""Reference MLP for one device: linear layers with GELU between them.

    model = MLP(sizes(context=16, hidden=256, layers=3))
    loss = cross_entropy_sum(model(x_BI), y_B)[0] / B_global

cpp/include/fived/math/mlp.hpp is the same model with the same weights for the same seed.

    B batch  I inputs of a layer  O outputs  C classes (the 256 values of a byte)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import random
from common.errors import UsageError


def sizes(context: int, hidden: int, layers: int) -> list[int]:
    """Return [8 * context, hidden, ..., hidden, 256], sizes of `layers` layers from bits to a byte."""
    return [8 * context] + [hidden] * (layers - 1) + [256]


class MLP(nn.Module):
    """x_BI -> logits_BC, with `sizes` = [inputs, hidden, ..., classes].

    Weights are uniform in ±sqrt(3 / I), so that outputs have the variance of the inputs; biases in ±1 /
    sqrt(I). Raises UsageError for fewer than two sizes or one below 1.
    """

    def __init__(self, sizes: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise UsageError(f"an MLP needs two or more sizes, all at least 1; given {list(sizes)}")
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initial values would be drawn for nothing
            self.layers = nn.ModuleList(nn.Linear(i, o, dtype=dtype) for i, o in pairwise(sizes))
        self.to_empty(device=device)
        for stream, p in enumerate(self.parameters()):  # weight 0, bias 0, weight 1, ...
            inputs = sizes[stream // 2]
            bound = math.sqrt(3 / inputs) if stream % 2 == 0 else 1 / math.sqrt(inputs)
            values = (2 * random.uniform(seed, stream, np.arange(p.numel())) - 1) * bound
            p.data.copy_(torch.from_numpy(values).view(p.shape))

    def forward(self, x_BI: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x_BI = F.gelu(layer(x_BI), approximate="tanh")
        logits_BC: Tensor = self.layers[-1](x_BI)
        return logits_BC

    def flops_per_sample(self) -> int:
        """Return the operations of a sample's forward and backward pass: 6 per weight, 4 in the first layer.

        A multiply-add counts as two; the first layer needs no gradient of its input.
        """
        weights = [p.numel() for p in self.parameters() if p.dim() == 2]
        return 6 * sum(weights) - 2 * weights[0]
