"""Gradient sums on dp x ep: which gradients are summed over which axes, and the norm of the whole.

dp * ep ranks train one model with a mixture of experts; rank = d * ep + e. Every rank sees other tokens. The experts
are split along ep and copied along dp; all other parameters are the same on every rank:

                e = 0                  e = 1
    d = 0       dense, experts 0 1     dense, experts 2 3      tokens travel to their experts in this row
    d = 1       dense, experts 0 1     dense, experts 2 3      and in this one, but never from row to row

The ranks' losses add up to the loss of the global batch (each is divided by the number of all tokens). The backward
pass has left in `p.grad` what a rank knows: for a dense parameter the gradient from this rank's tokens, for the
experts the gradient from all tokens that visited them here, which came from all ranks of the row. One rule follows: a
gradient is summed over exactly the axes along which tokens are split and the parameter is a copy. The norm
is that of one device's gradient: every number of it counts once.

The parameters come by name. Names that begin with "experts." are this rank's experts, stacked on dimension 0; all
others are dense, the router and the shared expert among them. groups["dp"] are the ranks of this column, groups["ep"]
those of this row, groups["dp+ep"] all; group.size is the number of ranks. Experts that saw no token may have a `grad`
of None on one rank and a tensor on another. The sum then takes zeros for None: all ranks of a group must make the same
calls.

Use `comm.all_reduce(x, group)` alone: it replaces the tensor x by its sum over the ranks of the group, in place, and
returns at once for one rank.

The norm is graded apart, on right gradients: where none of the tokens of the whole batch visits an expert, its grad may
be None there, too.

Targets: every gradient and the norm equal to one device, on meshes of 1, 2, 3 and 4 ranks; bytes of exactly 2(n-1)/n
of the dense gradients, n = dp * ep, and 2(dp-1)/dp of this rank's expert gradients; for the norm at most 16 bytes are
all-reduced. docs/05-expert-parallelism.md, "Gradient sums along ep".
"""

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group


def sum_gradients(parameters: dict[str, nn.Parameter], groups: dict[str, Group]) -> None:
    """Sum every p.grad over its axes, in place."""
    raise NotImplementedError(
        "for each name choose the group whose ranks hold copies of it and see other tokens"
    )


def gradient_norm(parameters: dict[str, nn.Parameter], groups: dict[str, Group]) -> Tensor:
    """Return the 2-norm of the whole gradient, after sum_gradients: a float64 scalar, the same on every rank."""
    raise NotImplementedError(
        "add the squares of dense and of expert gradients apart; then: which of the sums is only a part on each rank?"
    )
