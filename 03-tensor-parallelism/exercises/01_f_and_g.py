"""Tensor parallelism's two operators f and g, with their backward passes.

A matrix A split by columns and a matrix B split by rows meet in y = relu(x A) B, on two ranks:

    x  R ──f──▶ x A0, x A1  S ──relu──▶ S ──× B0, B1──▶ P ──g──▶ y  R

        forward                               backward
    f   every rank uses the same x            the loss reaches x through the columns of every rank:
                                              the gradient of x is the sum of the ranks' terms
    g   y is the sum of the ranks' terms      the loss is computed from y on every rank, and counts once:
                                              the gradient of each term is that of y, which all ranks have

(R: replicated, the same on all ranks. S: each rank has its columns. P: each rank has a term of the sum.) Autograd
knows nothing of other ranks, so write the backward passes yourself, for example in a class derived from
torch.autograd.Function: static methods `forward(ctx, x, group)` and `backward(ctx, dy)`, which returns one gradient per
argument of forward (None for the group); what backward needs goes into ctx; `apply` calls it.

`comm.all_reduce(t, group)` replaces the contents of t on every rank by the sum over the ranks of the group. It works in
place and autograd does not see it. `group.rank` and `group.size` are this rank's place and the number of ranks.

Targets: values and gradients, also of both together against one device; x and the incoming gradient unchanged; f sends
nothing forward and one all-reduce backward, g the reverse.
"""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def f(x: Tensor, group: Group) -> Tensor:
    """Return x, the same on all ranks; in the backward pass, sum the gradients over the ranks."""
    raise NotImplementedError("derive a class from torch.autograd.Function whose forward returns x unchanged")


def g(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the ranks as a new tensor; in the backward pass, pass the gradient on."""
    raise NotImplementedError(
        "derive a class from torch.autograd.Function whose forward all-reduces a copy of x"
    )
