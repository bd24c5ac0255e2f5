"""Model of the worked examples: an MLP on four tokens, in integers small enough for a pencil.

    h_TF = x_TD A_DF     g_TF = relu(h_TF)     y_TD = g_TF B_FD     loss = sum of (y_TD - target_TD)^2 / 2T

    dy_TD = (y_TD - target_TD) / T     dB_FD = g^T dy     dA_DF = x^T (dy B^T where h > 0, else 0)

Every lesson `*_by_hand.py` splits this model in its chapter's way, and sends by hand what the split needs.

T tokens  D width  F hidden width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

X_TD = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 1]])
TARGET_TD = torch.tensor([[-1.0, 2], [1, 4], [-1, -3], [10, 3]])
A_DF = torch.tensor([[1.0, 2], [1, -1]])
B_FD = torch.tensor([[1.0, 0], [1, 1]])


@dataclass(frozen=True)
class Step:
    """Values and gradients of a forward and backward pass."""

    h_tF: Tensor
    y_tD: Tensor
    dy_tD: Tensor
    dA_DF: Tensor
    dB_FD: Tensor


def step(x_tD: Tensor, target_tD: Tensor, count: int) -> Step:
    """Return the pass of the whole MLP over some tokens; the loss is divided by `count` tokens."""
    h_tF = x_tD @ A_DF
    g_tF = h_tF.relu()
    y_tD = g_tF @ B_FD
    dy_tD = (y_tD - target_tD) / count
    dh_tF = (dy_tD @ B_FD.T).where(h_tF > 0, 0)
    return Step(h_tF, y_tD, dy_tD, x_tD.T @ dh_tF, g_tF.T @ dy_tD)


def one_device() -> Step:
    """Return the pass over all four tokens."""
    return step(X_TD, TARGET_TD, len(X_TD))
