"""Ulysses: an all-to-all between the split of the tokens and that of the heads; its adjoint is the way back."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common import comm
from common.comm import Group


class AllToAll(torch.autograd.Function):
    """Piece j of dimension 0 goes to rank j; its gradient comes back from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Swap the pieces."""
        ctx.group = group
        return comm.all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Swap their gradients back."""
        return comm.all_to_all(dy, ctx.group), None


def to_heads(x_BHsK: Tensor, group: Group) -> Tensor:
    """Return this rank's heads of all tokens, x_BhSK, from all heads of its own tokens; differentiable."""
    x_nBhsK = x_BHsK.unflatten(1, (group.size, -1)).movedim(1, 0)  # n: the rank that gets these heads
    x_nBhsK = AllToAll.apply(x_nBhsK, group)  # n: the rank of these tokens
    return x_nBhsK.movedim(0, 2).flatten(2, 3)


def to_tokens(x_BhSK: Tensor, group: Group) -> Tensor:
    """Undo to_heads: return all heads of this rank's tokens, x_BHsK; differentiable."""
    x_nBhsK = x_BhSK.unflatten(2, (group.size, -1)).movedim(2, 0)  # n: the rank that gets these tokens
    x_nBhsK = AllToAll.apply(x_nBhsK, group)  # n: the rank of these heads
    return x_nBhsK.movedim(0, 1).flatten(1, 2)


def ulysses(q_BHsK: Tensor, k_BHsK: Tensor, v_BHsK: Tensor, causal: bool, group: Group) -> Tensor:
    """Return attention of this rank's tokens to all tokens, o_BHsK."""
    q_BhSK, k_BhSK, v_BhSK = (to_heads(x, group) for x in (q_BHsK, k_BHsK, v_BHsK))
    return to_tokens(F.scaled_dot_product_attention(q_BhSK, k_BhSK, v_BhSK, is_causal=causal), group)
