"""Adjoint of the gathered keys.

Rank r has the queries, keys and values of its own tokens. Its queries read the keys of all tokens, so the keys are
gathered (and the values likewise):

    forward     rank 0: k_0          all ranks:  k = [k_0 k_1 k_2]
                rank 1: k_1    --->
                rank 2: k_2

    backward    rank 0: dk from its queries    [a_0 a_1 a_2]      rank 0: a_0 + b_0 + c_0
                rank 1:                        [b_0 b_1 b_2] ---> rank 1: a_1 + b_1 + c_1
                rank 2:                        [c_0 c_1 c_2]      rank 2: a_2 + b_2 + c_2

The queries of every rank add their term to the gradient of every key. Autograd knows nothing of other ranks, so write
the backward pass yourself, in a class derived from torch.autograd.Function: static methods `forward(ctx, x, ...)` and
`backward(ctx, dy)`, which returns one gradient per argument of forward (None for those that are no tensors); what
backward needs goes into ctx as an attribute; `apply` calls the class with forward's arguments.

Two calls are allowed; autograd sees neither. `group.rank` and `group.size` are this rank's place and the number of
ranks.

    comm.all_gather(x, group, dim, sizes)        pieces of all ranks joined along `dim`, on all ranks
    comm.reduce_scatter(x, group, dim, sizes)    x has the same shape on all ranks: the sum over the ranks, cut along
                                                 `dim` into pieces; rank r gets piece r

`sizes` lists the length of each rank's piece along `dim`; the pieces may differ. Both return new tensors.

Targets: values and gradients within 1e-12, also of attention with causal mask against one device; one all-gather
forward and one reduce-scatter backward, each (n-1)/n of the bytes of all keys; no tensor kept for the backward pass.
"""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def gather_keys(x_BHsK: Tensor, sizes: list[int], group: Group) -> Tensor:
    """Return the keys (or values) of all ranks, x_BHSK, in the order of the ranks; differentiable.

    B batch, H heads, s tokens of this rank (sizes[group.rank]), S tokens of all ranks (sum(sizes)), K width of a head.
    """
    raise NotImplementedError(
        "derive a class from torch.autograd.Function whose forward all-gathers x along dim 2"
    )
