"""Uneven all-to-all: its adjoint is the all-to-all with the sizes exchanged; received rows are sorted by expert."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group


class AllToAll(torch.autograd.Function):
    """Rows to other ranks; their gradients go back."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.sizes = send, receive, group
        return comm.all_to_all(x_RD, group, send, receive)

    @staticmethod
    def backward(ctx: Any, dy_QD: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.sizes
        return comm.all_to_all(dy_QD, group, receive, send), None, None, None


def all_to_all(x_RD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Return the rows received, as comm.all_to_all does, with a gradient."""
    return AllToAll.apply(x_RD, send, receive, group)


def through_experts(
    rows_RD: Tensor, counts_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor], group: Group
) -> Tensor:
    """Return the experts' results for rows_RD, which are sorted by expert, in the same order."""
    sizes = comm.sizes_of(len(counts_E), group.size)
    e = sizes[group.rank]
    counts_ne = comm.all_to_all(counts_E, group, sizes, [e] * group.size).view(group.size, e)
    send = [int(counts.sum()) for counts in counts_E.split(sizes)]
    receive = counts_ne.sum(1).tolist()
    expert_Q = (
        torch.arange(e).repeat(group.size).repeat_interleave(counts_ne.flatten())
    )  # of each row received
    order_Q = expert_Q.argsort(stable=True)
    rows_QD = all_to_all(rows_RD, send, receive, group)[order_Q]
    y_QD = experts(rows_QD, counts_ne.sum(0))[order_Q.argsort()]
    return all_to_all(y_QD, receive, send, group)
