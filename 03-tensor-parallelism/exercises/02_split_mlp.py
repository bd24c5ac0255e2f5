"""An MLP split by columns, then by rows: one all-reduce in each pass.

On one device the MLP is y = gelu(x A + a) B + b, with D features outside and F hidden ones. Over n ranks, A and a are
split by columns and B by rows, so that a rank computes its own f hidden features from beginning to end:

    x  R ──copy──▶ x Ar + ar  S ──gelu──▶ S ──× Br──▶ P ──reduce──▶ + b  R          r: this rank

Nothing is gathered in between, because gelu works on one number at a time. Names end in shapes: B samples, S tokens,
D features, F hidden features, small f those of this rank. The layers that are given are torch's nn.Linear, whose weight
is [out, in]: up.weight is [F, D], so columns of A are rows of up.weight; down.weight is [D, F].

`comm.sizes_of(F, n)` lists how many features each rank gets, in order: they differ by one where n does not divide F.
`group.rank` and `group.size` are this rank's place and the number of ranks. Two operators with their backward passes
are given:

    collectives.copy(x, group)       returns x; the gradients are summed over the ranks    (f of exercise 1)
    collectives.reduce(x, group)     the sum over the ranks; the gradient is passed on     (g of exercise 1)

Targets: each rank holds its shards and nothing else; y, the gradient of x and the gradients of all shards are those of
one device; one all-reduce of y forward, one of the gradient of x backward; D + 2 f numbers per token are kept for the
backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives


class SplitMLP(nn.Module):
    """This rank's shards of an MLP, as nn.Parameters.

    up_weight_fD and up_bias_f: of its hidden features. down_weight_Df: the columns for these features.
    down_bias_D: whole, the same on all ranks.
    """

    def __init__(self, up: nn.Linear, down: nn.Linear, group: Group) -> None:
        """Copy this rank's shards of two whole layers, which are the same on all ranks and are not kept."""
        super().__init__()
        raise NotImplementedError("cut up.weight to this rank's rows, and copy them into an nn.Parameter")

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return y_BSD, the same on all ranks, of x_BSD, the same on all ranks."""
        raise NotImplementedError("compute this rank's hidden features (F.linear, F.gelu)")
