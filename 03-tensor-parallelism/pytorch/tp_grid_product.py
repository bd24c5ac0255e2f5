"""Matrix product on a grid, for any method that moves the blocks: gradients, sum over layers, bytes.

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

from common import comm
from common.comm import collectives

from tp_grid import Blocks


class Method(Protocol):
    """Interface that Summa and Cannon share."""

    blocks: Blocks

    def multiply(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        """Write this rank's block of A B into c, the term of its layer."""

    def gradients(self, a: Tensor, b: Tensor, dc: Tensor, da: Tensor, db: Tensor) -> None:
        """Write this rank's blocks of dC B^T and A^T dC into da and db."""

    def bytes(self, item: int) -> tuple[Fraction, Fraction]:
        """Return the bytes this rank sends inside its layer (forward, backward). item: bytes per number."""


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
    """Return this rank's block of C = A B, differentiable. `Blocks` places the blocks and their gradients.

    a is [m, k], b [k, j]. With several layers each computes a term of C, and the sum is cut by rows over the
    layers.
    """
    terms = cast(Tensor, _Multiply.apply(a.contiguous(), b.contiguous(), method))
    return collectives.reduce_scatter(terms, method.blocks.grid.depth, 0)


def bytes_by_formula(method: Method, item: int) -> tuple[Fraction, Fraction]:
    """Return the bytes this rank sends (forward, backward), including the sum over layers."""
    depth, blocks = method.blocks.grid.depth.size, method.blocks
    longest = ceil((blocks.rows.stop - blocks.rows.start) / depth)
    sum_over_layers = (depth - 1) * longest * (blocks.columns.stop - blocks.columns.start) * item
    forward, backward = method.bytes(item)
    return forward + sum_over_layers, backward + sum_over_layers


def prepared(a: Tensor, b: Tensor, method: Method) -> Callable[[], Tensor]:
    """Return the forward pass of `multiply` as a function whose calls all write into the same terms of C.

    A newly allocated block of 64 MiB costs 16384 page faults, which take longer than sending the block.
    """
    terms = a.new_empty(a.shape[0], b.shape[1])

    def call() -> Tensor:
        method.multiply(a, b, terms)
        return comm.reduce_scatter(terms, method.blocks.grid.depth)

    return call
