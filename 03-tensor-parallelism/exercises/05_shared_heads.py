"""Key-value heads that several ranks share.

Tensor parallelism splits attention by heads. With grouped queries, H query heads read only G key-value heads: query
head h reads key-value head h // (H / G). Where the ranks are more than these, several ranks need the same one:

    H = 8, G = 2        rank 0     rank 1     rank 2     rank 3
    query heads         0 1        2 3        4 5        6 7
    key-value head      0          0          1          1
    gradient of k, v    a          b          c          d          terms of ranks that share: a + b, c + d

Each rank holds a copy of the heads that its query heads read, and no others. Its backward pass gives the term of their
gradient that comes through its own query heads; the gradient of the head is the sum over the ranks that hold it.
Without this sum the copies drift apart, and the loss hardly shows it. A sum over all ranks would add different heads.

Names end in shapes: B samples, S tokens, D features, K width of a head, H query heads, G key-value heads, small h and g
those of this rank. n divides H; either n divides G (no head is shared), or G divides n.

    q_BhSK = torch.einsum("bsd,hkd->bhsk", x_BSD, self.q_hKD)                                     likewise k and v
    F.scaled_dot_product_attention(q_BhSK, k_BgSK, v_BgSK, is_causal=True, enable_gqa=True)       y_BhSK
    torch.einsum("bhsk,hkd->bsd", y_BhSK, self.o_hKD)                                             this rank's term of y
    collectives.copy(x, group)       returns x; the gradients are summed over the ranks           (f of exercise 1)
    collectives.reduce(x, group)     the sum over the ranks; the gradient is passed on            (g of exercise 1)
    group.part("shared", members)    the group of these ranks, a list of places in the group, in order; exactly its
                                     members call it; group.rank and group.size are this rank's place and n
    comm.all_reduce(t, group)        in place: t becomes the sum over the ranks of the group

Targets: each rank holds its heads and nothing else; y and all gradients are those of one device; one all-reduce forward
and one backward; sum_gradients sends the bytes of an all-reduce of its own heads over the ranks that share them, and
nothing where no head is shared.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives


class SharedAttention(nn.Module):
    """This rank's heads, as nn.Parameters q_hKD, k_gKD, v_gKD and o_hKD."""

    def __init__(self, q_HKD: Tensor, k_GKD: Tensor, v_GKD: Tensor, o_HKD: Tensor, group: Group) -> None:
        """Copy this rank's heads of the whole weights, which are the same on all ranks and are not kept."""
        super().__init__()
        raise NotImplementedError("list this rank's query heads, and the key-value heads that they read")

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return y_BSD, the same on all ranks, of x_BSD, the same on all ranks."""
        raise NotImplementedError("project x to this rank's queries, keys and values")

    def sum_gradients(self) -> None:
        """After the backward pass: sum the gradients of keys and values over the ranks that hold the same heads."""
        raise NotImplementedError(
            "make the group of the ranks that share this rank's heads (group.part), once"
        )
