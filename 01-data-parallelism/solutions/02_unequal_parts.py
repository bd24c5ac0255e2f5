"""Gradients of unequal parts: divide by the targets of all ranks, and sum what at least one rank has."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import comm
from common.comm import Group


def backward(model: nn.Module, x_bD: Tensor, y_b: Tensor, group: Group) -> Tensor:
    """Set every p.grad to the gradient of the mean over the whole batch (None if unused); return that mean."""
    count = (y_b != -100).sum()
    comm.all_reduce(count, group)
    loss = F.cross_entropy(model(x_bD), y_b, reduction="sum") / count
    loss.backward()
    parameters = list(model.parameters())
    used = torch.tensor([float(p.grad is not None) for p in parameters])
    comm.all_reduce(used, group)
    for p, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            comm.all_reduce(p.grad, group)
    total = loss.detach()
    comm.all_reduce(total, group)
    return total
