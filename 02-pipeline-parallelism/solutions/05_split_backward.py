"""Split backward: dx from the product's backward, dw from a function that is called later; and ZB-H1."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Instruction = tuple[str, int, int]


class Product(torch.autograd.Function):
    """The product x w^T, whose backward leaves dw for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, later: list[Callable[[], None]]) -> Tensor:
        """Return y_bO."""
        ctx.save_for_backward(x, w)
        ctx.later = later
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Return dx_bI; keep dy and x for dw_OI."""
        x, w = ctx.saved_tensors

        @torch.no_grad()
        def add() -> None:
            dw = dy.T @ x
            w.grad = dw if w.grad is None else w.grad + dw

        ctx.later.append(add)
        return dy @ w, None, None


def product(x: Tensor, w: Tensor, later: list[Callable[[], None]]) -> Tensor:
    """Return y_bO."""
    return Product.apply(x, w, later)


def zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield what this rank computes."""
    ahead = ranks - 1 - rank
    late = ahead + rank
    for m in range(micro_batches + late):
        if m < micro_batches:
            yield "F", rank, m
        if ahead <= m < micro_batches + ahead:
            yield "I", rank, m - ahead
        if m >= late:
            yield "W", rank, m - late
