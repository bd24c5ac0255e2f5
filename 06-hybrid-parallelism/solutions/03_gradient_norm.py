"""Gradient norm: a gradient on k ranks gives 1/k of its squares from each."""

import math

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def gradient_norm(gradients: list[tuple[Tensor, set[str]]], shape: dict[str, int], group: Group) -> float:
    """Return the 2-norm of the whole model's gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient, axes in gradients:
        copies = math.prod(n for axis, n in shape.items() if axis not in axes)
        total += gradient.double().square().sum() / copies
    comm.all_reduce(total, group)
    return math.sqrt(total.item())
