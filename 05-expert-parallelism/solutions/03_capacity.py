"""Capacity: a choice's slot is the number of earlier choices of its expert in its sequence."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def capacity(S: int, K: int, E: int, c: float) -> int:
    """Return the slots C of an expert for a sequence."""
    return math.ceil(c * K * S / E)


def slots(experts_BSK: Tensor, E: int, C: int) -> Tensor:
    """Return slot_BSK, int64: the slot of each choice at its expert, 0 to C - 1, or -1 if it is dropped."""
    chosen_BN = experts_BSK.flatten(1)
    so_far_BNE = F.one_hot(chosen_BN, E).cumsum(1)
    slot_BN = so_far_BNE.gather(2, chosen_BN[..., None])[..., 0] - 1
    return torch.where(slot_BN < C, slot_BN, -1).view_as(experts_BSK)


def dispatch(x_BSD: Tensor, experts_BSK: Tensor, slot_BSK: Tensor, E: int, C: int) -> Tensor:
    """Return rows_EBCD: the token in each slot of each expert and sequence, zeros in empty slots."""
    b, s, k = (slot_BSK >= 0).nonzero(as_tuple=True)
    rows_EBCD = x_BSD.new_zeros(E, len(x_BSD), C, x_BSD.shape[-1])
    rows_EBCD[experts_BSK[b, s, k], b, slot_BSK[b, s, k]] = x_BSD[b, s]
    return rows_EBCD


def combine(y_EBCD: Tensor, experts_BSK: Tensor, slot_BSK: Tensor, weights_BSK: Tensor) -> Tensor:
    """Return y_BSD: the weighted sum over a token's choices that were kept, 0 if there is none."""
    b, s, k = (slot_BSK >= 0).nonzero(as_tuple=True)
    kept = y_EBCD[experts_BSK[b, s, k], b, slot_BSK[b, s, k]] * weights_BSK[b, s, k, None]
    y_BSD = kept.new_zeros(*experts_BSK.shape[:2], y_EBCD.shape[-1])
    return y_BSD.index_put((b, s), kept, accumulate=True)
