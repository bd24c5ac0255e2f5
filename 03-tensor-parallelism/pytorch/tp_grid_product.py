"""The product of matrices on a grid, whatever moves the blocks: its gradients, the sum over layers, its bytes.

    C = A B      C_l = the product of layer l's part of the inner dimension (SUMMA, Cannon)
                 C   = sum over the layers, cut by rows over them: a reduce-scatter
    backward     the gradient of C is gathered over the layers, then every layer computes its dA and dB

m, k, j: rows of A and C, the inner dimension, columns of B and C, of one rank
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from tp_grid import Blocks

from common import collectives, comm


class Method(Protocol):
    """What Summa and Cannon share."""

    blocks: Blocks

    def multiply(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        """c = this rank's block of A B, of its layer."""

    def gradients(self, a: Tensor, b: Tensor, dc: Tensor, da: Tensor, db: Tensor) -> None:
        """da, db = this rank's blocks of dC B^T and A^T dC."""

    def bytes(self, item: int) -> tuple[Fraction, Fraction]:
        """What this rank sends forward and backward inside its layer."""


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, method: Method) -> Tensor:
        ctx.method = method
        ctx.save_for_backward(a, b)
        c = a.new_empty(a.shape[0], b.shape[1])
        method.multiply(a, b, c)
        return c

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        ctx.method.gradients(a, b, grads[0].contiguous(), da, db)
        return da, db, None


def multiply(a: Tensor, b: Tensor, method: Method) -> Tensor:
    """This rank's block of C = A B, differentiable. Blocks lie as `Blocks` says, and so do their gradients.

    a [m, k], b [k, j]; with layers, each has a term of C, and the sum is cut by rows over them.
    """
    terms = cast(Tensor, _Multiply.apply(a.contiguous(), b.contiguous(), method))
    return collectives.reduce_scatter(terms, method.blocks.grid.depth, 0)


def bytes_by_formula(method: Method, item: int) -> tuple[Fraction, Fraction]:
    """What this rank sends forward and backward, the sum over the layers included."""
    depth, blocks = method.blocks.grid.depth.size, method.blocks
    longest = ceil((blocks.rows.stop - blocks.rows.start) / depth)
    sum_over_layers = (depth - 1) * longest * (blocks.columns.stop - blocks.columns.start) * item
    forward, backward = method.bytes(item)
    return forward + sum_over_layers, backward + sum_over_layers


def prepared(a: Tensor, b: Tensor, method: Method) -> Callable[[], Tensor]:
    """The forward pass of `multiply` in memory that is taken once: each call writes into the same terms of C.

    A fresh block of 64 MiB costs 16384 page faults, which is more than it costs to send it.
    """
    terms = a.new_empty(a.shape[0], b.shape[1])

    def call() -> Tensor:
        method.multiply(a, b, terms)
        return comm.reduce_scatter(terms, method.blocks.grid.depth)

    return call
