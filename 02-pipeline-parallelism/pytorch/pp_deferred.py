"""Backward pass of a matrix product in two halves, the second of which can be deferred.

    y = x w^T        I:  dx = dy w      the previous stage waits for it
                     W:  dw = dy^T x    needed only by the optimizer's step

Autograd computes both halves at once. Here the backward of a product returns dx, and stores a function that
computes dw later. That function keeps x and dy; the rest of the graph is freed after I. Norms, biases and
embeddings stay in I, since they cost little. (Qi et al., arXiv:2401.10241, section 4.) As autograd does, it calls
the weight's hooks once its gradient has grown: data parallelism sends gradients from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from common.models.transformer import MatrixProduct

Work = Callable[[], None]


class Deferred:
    """Store of deferred weight gradients. Outside of `collect()` these are computed at once."""

    def __init__(self) -> None:
        self.waiting: list[Work] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[Work]]:
        """Collect weight gradients of backward passes inside as functions; call each once, in any order."""
        self.waiting = []
        try:
            yield self.waiting
        finally:
            self.waiting = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return F.linear(x, weight, bias). x [..., in], weight [out, in], bias [out]."""
        y = cast(Tensor, _Product.apply(x, _Product.anchor if weight.requires_grad else None, (weight, self)))
        return y if bias is None else y + bias

    def replace(self, module: nn.Module) -> None:
        """Make every matrix product inside compute with `linear`."""
        for part in module.modules():
            if isinstance(part, MatrixProduct):
                part.product = self.linear


class _Product(torch.autograd.Function):
    """x w^T, whose weight autograd does not see: a pass that puts dw off would call its hooks without a gradient."""

    anchor = torch.zeros((), requires_grad=True)  # makes autograd call the backward where x needs no gradient

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, product: tuple[Tensor, Deferred]) -> Tensor:
        weight, ctx.deferred = product
        y = x @ weight.T
        ctx.save_for_backward(x.to(y.dtype))  # under autocast the product is in 16 bits
        ctx.weight = weight  # if saved, checkpointing would return a copy
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None]:
        (x,), (dy,), weight = ctx.saved_tensors, grads, ctx.weight
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        if weight.requires_grad:
            work = partial(_add, weight, lambda: dy.flatten(0, -2).T @ x.flatten(0, -2))
            work() if ctx.deferred.waiting is None else ctx.deferred.waiting.append(work)
        return dx, None, None


@torch.no_grad()  # a saved x carries a graph, which the gradient would keep
def _add(weight: Tensor, compute: Callable[[], Tensor]) -> None:
    gradient = compute()
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad += gradient
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
