"""Global balance loss: counts summed over the ranks first; then the loss is a sum over tokens, split over ranks."""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def balance_loss(parts: list[tuple[Tensor, Tensor]], group: Group) -> Tensor:
    """Return this rank's part of the loss, a scalar."""
    scores_TE = torch.cat([scores for scores, _ in parts])
    experts_TK = torch.cat([experts for _, experts in parts])
    E, K = scores_TE.shape[1], experts_TK.shape[1]
    counts_E = torch.bincount(experts_TK.flatten(), minlength=E)
    comm.all_reduce(counts_E, group)
    f_E = counts_E.to(scores_TE) / counts_E.sum()
    tokens = counts_E.sum() / K  # of all ranks
    return E * (f_E * scores_TE.sum(0) / tokens).sum()
