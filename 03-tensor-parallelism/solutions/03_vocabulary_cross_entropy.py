"""Two all-reduces of three numbers per token; softmax of this rank's columns is kept for the gradient."""

from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group


class CrossEntropy(torch.autograd.Function):
    """Loss of each token from this rank's columns."""

    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, targets_N: Tensor, begin: int, group: Group) -> Tensor:
        m_N = logits_Nv.amax(1)
        comm.all_reduce(m_N, group, "max")
        shifted_Nv = logits_Nv - m_N[:, None]
        row_n = ((targets_N >= begin) & (targets_N < begin + logits_Nv.shape[1])).nonzero()[:, 0]
        column_n = targets_N[row_n] - begin
        sums_2N = torch.zeros(2, *m_N.shape, dtype=m_N.dtype)
        sums_2N[1, row_n] = shifted_Nv[row_n, column_n]
        softmax_Nv = shifted_Nv.exp_()
        sums_2N[0] = softmax_Nv.sum(1)
        comm.all_reduce(sums_2N, group)
        softmax_Nv /= sums_2N[0][:, None]
        ctx.save_for_backward(softmax_Nv, row_n, column_n)
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, dloss_N: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_Nv, row_n, column_n = ctx.saved_tensors
        dlogits_Nv = softmax_Nv * dloss_N[:, None]
        dlogits_Nv[row_n, column_n] -= dloss_N[row_n]
        return dlogits_Nv, None, None, None


def cross_entropy(logits_Nv: Tensor, targets_N: Tensor, begin: int, group: Group) -> Tensor:
    """Return loss_N, the cross-entropy of each token in nats, the same on all ranks."""
    return CrossEntropy.apply(logits_Nv, targets_N, begin, group)
