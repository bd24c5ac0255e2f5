"""Backward pass of a matrix product in two halves, the second of which can be deferred.

    y = x w^T        I:  dx = dy w      the previous stage waits for it
                     W:  dw = dy^T x    needed only by the optimizer's step

Autograd computes both halves at once. Here the backward of a product returns dx, and stores a function that
computes dw later. That function keeps x and dy; the rest of the graph is freed after I. Norms, biases and
embeddings stay in I, since they cost little. (Qi et al., arXiv:2401.10241, section 4.) As autograd does, it calls
the weight's hooks once its gradient has grown: data parallelism sends gradients from there.

Schedules without a W use the same product, since it saves a pass over memory: autograd makes a tensor of dw for each
micro-batch and then adds it to the gradient, and here the product itself adds to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
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
        anchor = _Product.anchor if weight.requires_grad else None
        return cast(Tensor, _Product.apply(x, bias, anchor, (weight, self)))

    def replace(self, module: nn.Module) -> None:
        """Make every matrix product inside compute with `linear`."""
        for part in module.modules():
            if isinstance(part, MatrixProduct):
                part.product = self.linear


class _Product(torch.autograd.Function):
    """x w^T, whose weight autograd does not see: a pass that puts dw off would call its hooks without a gradient."""

    anchor = torch.zeros((), requires_grad=True)  # makes autograd call the backward where x needs no gradient

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor | None, product: tuple[Tensor, Deferred]
    ) -> Tensor:
        weight, ctx.deferred = product
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype))  # under autocast the product is in 16 bits
        ctx.weight = weight  # if saved, checkpointing would return a copy
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,), (dy,), weight = ctx.saved_tensors, grads, ctx.weight
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if weight.requires_grad:
            work = partial(_add, weight, dy.flatten(0, -2), x.flatten(0, -2))
            work() if ctx.deferred.waiting is None else ctx.deferred.waiting.append(work)
        return dx, db, None, None


@torch.no_grad()  # a saved x carries a graph, which the gradient would keep
def _add(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    if weight.grad is None:
        weight.grad = (dy.T @ x).to(weight.dtype)
    elif weight.dtype == dy.dtype:
        weight.grad.addmm_(dy.T, x)
    else:
        weight.grad += dy.T @ x
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)
