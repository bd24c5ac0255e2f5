"""Merge of two softmax blocks: a block has the weight exp(its lse - the merged lse)."""

import torch
from torch import Tensor


def merge(o1_SK: Tensor, lse1_S: Tensor, o2_SK: Tensor, lse2_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o_SK, lse_S) of attention to the keys of both blocks, as new tensors."""
    lse_S = torch.logaddexp(lse1_S, lse2_S)
    scale_S = lse_S.masked_fill(lse_S == -torch.inf, 0)  # hidden from both: -inf - -inf is NaN
    w1_S, w2_S = (lse1_S - scale_S).exp(), (lse2_S - scale_S).exp()
    return w1_S[..., None] * o1_SK + w2_S[..., None] * o2_SK, lse_S
