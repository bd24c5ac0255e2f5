"""Copies of the key-value heads that this rank's query heads read; gradients summed over the ranks that share them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives


class SharedAttention(nn.Module):
    """This rank's heads, as nn.Parameters."""

    def __init__(self, q_HKD: Tensor, k_GKD: Tensor, v_GKD: Tensor, o_HKD: Tensor, group: Group) -> None:
        """Copy this rank's heads of the whole weights."""
        super().__init__()
        n, r, G = group.size, group.rank, len(k_GKD)
        h, g, sharing = len(q_HKD) // n, max(G // n, 1), max(n // G, 1)
        self.group, first = group, r - r % sharing
        self.shared = group.part("shared", range(first, first + sharing))

        def mine(weight: Tensor, begin: int, heads: int) -> nn.Parameter:
            return nn.Parameter(weight.detach()[begin : begin + heads].clone())

        self.q_hKD, self.o_hKD = mine(q_HKD, r * h, h), mine(o_HKD, r * h, h)
        self.k_gKD, self.v_gKD = mine(k_GKD, r * G // n, g), mine(v_GKD, r * G // n, g)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return y_BSD, the same on all ranks, of x_BSD, the same on all ranks."""
        x_BSD = collectives.copy(x_BSD, self.group)
        q, k, v = (torch.einsum("bsd,hkd->bhsk", x_BSD, w) for w in (self.q_hKD, self.k_gKD, self.v_gKD))
        y_BhSK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return collectives.reduce(torch.einsum("bhsk,hkd->bsd", y_BhSK, self.o_hKD), self.group)

    def sum_gradients(self) -> None:
        """Sum the gradients of keys and values over the ranks that hold the same heads."""
        for p in (self.k_gKD, self.v_gKD):
            comm.all_reduce(p.grad, self.shared)
