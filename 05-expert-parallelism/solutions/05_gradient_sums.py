"""Gradient sums on dp x ep: experts over dp, dense parameters over both; in the norm, experts add up over ep."""

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group


def sum_gradients(parameters: dict[str, nn.Parameter], groups: dict[str, Group]) -> None:
    """Sum every p.grad over its axes, in place."""
    for name, p in parameters.items():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        comm.all_reduce(p.grad, groups["dp" if name.startswith("experts.") else "dp+ep"])


def gradient_norm(parameters: dict[str, nn.Parameter], groups: dict[str, Group]) -> Tensor:
    """Return the 2-norm of the whole gradient, after sum_gradients: a float64 scalar, the same on every rank."""
    dense, experts = torch.zeros(2, dtype=torch.float64)
    for name, p in parameters.items():
        if p.grad is not None:
            (experts if name.startswith("experts.") else dense).add_(p.grad.double().square().sum())
    comm.all_reduce(experts, groups["ep"])
    return (dense + experts).sqrt()
