"""Ulysses: swap tokens for heads, attend, swap back.

Rank r holds all heads of its own tokens. Heads do not read one another, so an all-to-all gives each rank some heads of
all tokens; attention there needs no other rank; a second all-to-all restores the split of the tokens.

    rows: heads, columns: tokens, digits: the rank that holds it (2 ranks, 4 heads, 4 tokens)

         q, k, v             attention           o
         0 0 1 1             0 0 0 0             0 0 1 1
         0 0 1 1    --->     0 0 0 0    --->     0 0 1 1
         0 0 1 1             1 1 1 1             0 0 1 1
         0 0 1 1             1 1 1 1             0 0 1 1

Rank j gets heads j h to (j+1) h - 1, where h = H / n. n = group.size divides H, and all ranks have equally many tokens:
those of rank r are r s to (r+1) s - 1 of the sequence. Shapes: x_BHsK with B samples, H heads, s tokens, width K, and
x_BhSK with h = H / n heads and S = n s tokens.

One call is allowed: `comm.all_to_all(x, group)` cuts x along dimension 0 into n equal pieces and sends piece j to rank
j; the result has in place j the piece that came from rank j, and the shape of x. Autograd does not see it, so it needs
a class derived from torch.autograd.Function: static methods `forward(ctx, x, group)` and `backward(ctx, dy)`, which
returns one gradient per argument of forward (None for the group); `apply` calls it. Which communication undoes an
all-to-all? `unflatten`, `flatten`, `movedim` and the like have their backward passes already.
`F.scaled_dot_product_attention(q, k, v, is_causal=causal)` is the kernel.

Targets: both swaps, attention and all gradients as on one device within 1e-12; every rank sends (n-1)/n of its q, k, v
and o forward and as much backward, in at most four all-to-alls each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common import comm
from common.comm import Group


def to_heads(x_BHsK: Tensor, group: Group) -> Tensor:
    """Return this rank's heads of all tokens, x_BhSK, from all heads of its own tokens; differentiable."""
    raise NotImplementedError(
        "make dimension 0 of x the rank that gets the heads (unflatten, movedim), and write an autograd function "
        "around comm.all_to_all"
    )


def to_tokens(x_BhSK: Tensor, group: Group) -> Tensor:
    """Undo to_heads: return all heads of this rank's tokens, x_BHsK; differentiable."""
    raise NotImplementedError(
        "make dimension 0 of x the rank that gets the tokens, and undo the steps of to_heads"
    )


def ulysses(q_BHsK: Tensor, k_BHsK: Tensor, v_BHsK: Tensor, causal: bool, group: Group) -> Tensor:
    """Return attention of this rank's tokens to all tokens, o_BHsK."""
    raise NotImplementedError("swap q, k and v, attend with this rank's heads, swap the result back")
