"""Megatron's sequence parallelism: a slice of the sequence per rank between the split matrices.

    y = x + gelu(norm(x) A + a) B + b         A, a split by columns and B by rows, as in exercise 2

With f and g, x, norm(x) and y are whole on every rank. An all-reduce is a reduce-scatter and an all-gather; put norm,
bias and residual between the two, and each rank computes and keeps them for its slice of the sequence alone:

    x S(1) ─▶ norm ─▶ enter ─▶ × Ar + ar ─▶ gelu ─▶ × Br ─▶ leave ─▶ + b, + x ─▶ y S(1)

            forward                              backward
    enter   S(1) to R: an all-gather             each rank has another gradient, a term of the sum, of all tokens
    leave   P to S(1): a reduce-scatter          each rank has the gradient of its own slice

Names end in shapes: B samples, S tokens in the whole sequence, s those of this rank's slice, D features, f this rank's
hidden features. (S(1): split along dimension 1. P: each rank has a term of the sum. R: the same on all.)

These calls return new tensors; autograd does not see them, so write the backward passes of `enter` and `leave`
yourself, in classes derived from torch.autograd.Function.

    sizes = comm.sizes_of(S, n)                      tokens of each rank's slice; n need not divide S
    comm.all_gather(x_BsD, group, 1, sizes)          the slices of all ranks joined along dimension 1
    comm.reduce_scatter(x_BSD, group, 1, sizes)      this rank's slice of the sum over the ranks
    comm.all_reduce(t, group)                        in place: t becomes the sum over the ranks, for `sum_gradients`

Parameters that are whole on every rank see only this rank's tokens, so their gradients are terms of a sum, too:
`Block.sum_gradients` adds them up. It is called once after the backward pass.

Targets: values and gradients of enter, leave and the block, on sequences that n does not divide; after sum_gradients,
the gradients of all parameters; in each pass one all-gather and one reduce-scatter, together the bytes of one
all-reduce; per token of the sequence 8 ((D + 2)/n + D + 2 f) bytes kept for the backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group


def enter(x_BsD: Tensor, group: Group, length: int) -> Tensor:
    """Return x_BSD, the slices of all ranks. length: S. In the backward pass, the gradients are terms of a sum."""
    raise NotImplementedError(
        "derive a class from torch.autograd.Function whose forward gathers, and find the adjoint of gathering"
    )


def leave(x_BSD: Tensor, group: Group) -> Tensor:
    """Return this rank's slice x_BsD of the sum over the ranks."""
    raise NotImplementedError(
        "derive a class from torch.autograd.Function whose forward reduces and scatters"
    )


class Block(nn.Module):
    """This rank's part of y = x + mlp(norm(x)); the attributes stay as they are given."""

    def __init__(self, norm: nn.LayerNorm, up: nn.Linear, down: nn.Linear, group: Group) -> None:
        """norm and down.bias: whole, the same on all ranks. up: D to f, down: f to D, this rank's hidden features."""
        super().__init__()
        self.norm, self.up, self.down, self.group = norm, up, down, group

    def forward(self, x_BsD: Tensor, length: int) -> Tensor:
        """Return this rank's slice y_BsD. length: S."""
        raise NotImplementedError(
            "norm(x), enter, this rank's hidden features, leave; then the bias and x, once"
        )

    def sum_gradients(self) -> None:
        """Sum the gradients that are terms of a sum over the ranks, in place."""
        raise NotImplementedError(
            "list the parameters that every rank holds whole and uses on its own tokens"
        )
