"""Dispatch and combine: a stable sort of the choices, its inverse, and one pick of rows in each direction."""

import torch
from torch import Tensor


def dispatch(x_TD: Tensor, experts_TK: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows_RD, counts_E, row_TK): the rows sorted by expert, rows per expert, and the row of each choice."""
    chosen_R = experts_TK.flatten()
    choice_R = chosen_R.argsort(stable=True)  # the choice in each row
    row_TK = choice_R.argsort().view_as(experts_TK)  # its inverse
    return x_TD[choice_R // experts_TK.shape[1]], torch.bincount(chosen_R, minlength=E), row_TK


def combine(y_RD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return y_TD: for each token the weighted sum of its K results."""
    return (y_RD[row_TK] * weights_TK[..., None]).sum(1)
