"""Backward pass of ring attention.

Queries stay; keys and values travel. In step t rank r has the keys of rank r - t (modulo n), attends to them, and
merges the result into (o, lse) of the blocks before. The forward pass below does that with n - 1 messages per rank.

Write the backward pass. dq belongs to own queries and stays. The gradients dkv of keys and values must end on
the rank of these keys, and every rank adds a term: send the keys round again, and each block's dkv after it.

    step     rank 0         rank 1         rank 2        (rank r computes its term for kv of rank r - t)
    0        kv0            kv1            kv2            own keys: this term stays at home
    1        kv2            kv0            kv1            a new dkv begins with this rank's term, and is sent on
    2        kv1            kv2            kv0            the dkv that came gets this rank's term, and is sent on
    after    + dkv0         + dkv1         + dkv2         the last dkv to come is this rank's own: terms of all others

So kv is sent n - 1 times and dkv n - 1 times: 3(n-1) blocks together with the forward pass. With o and lse of all keys,
the gradients of a block need nothing of the other blocks: `block_backward` gives them.

    message = comm.exchange(x, into, group, dst, src, tag, async_op=True)    starts to send x to rank dst and to receive
                                                                             from rank src into another tensor
    message.wait()                                                           both are done; leave both alone until then

Messages of equal tags arrive in the order in which they were sent; give kv and dkv different tags (0 and 1), because
both are under way at once. Without async_op the call returns when both are done: correct too, only slower. On one rank
nothing is sent, and `into` stays as it is. Two buffers each for kv and dkv suffice for any n: the one in use, and
the one that is received into. ctx.saved_tensors must not be overwritten: a graph may be run backward twice.

Targets: o, dq and dkv of one device within 1e-12 for 1 to 4 ranks; the saved tensors unchanged; n - 1 blocks forward
and 2(n-1) backward, by messages alone; at most 11 blocks alive at once in both passes (4 are these buffers, 1 is this
rank's own dkv, the rest are dq, o and the tensors inside and after `block_backward`), and no more on 6 ranks than on 3.
"""

import math
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group

# B batch  H heads  s tokens of a rank  K width of a head  2: keys, values


def block_forward(q_BHsK: Tensor, kv_2BHsK: Tensor) -> tuple[Tensor, Tensor]:
    """Return o_BHsK and lse_BHs1 of attention to one block of keys; no mask."""
    k, v = kv_2BHsK
    scores = q_BHsK @ k.mT / math.sqrt(q_BHsK.shape[-1])
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def block_backward(do: Tensor, q: Tensor, o: Tensor, lse: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return a block's terms of dq_BHsK and dkv_2BHsK; o and lse are those of all keys."""
    (k, v), scale = kv, 1 / math.sqrt(q.shape[-1])
    p = (q @ k.mT * scale - lse).exp()
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * scale
    return ds @ k, torch.stack((ds.mT @ q, p.mT @ do))


class RingAttention(torch.autograd.Function):
    """Autograd function (q_BHsK, kv_2BHsK, group) -> o_BHsK."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, group: Group) -> Tensor:
        """Attend to the blocks of keys as they come by, and merge the results."""
        n, right, left = group.size, (group.rank + 1) % group.size, (group.rank - 1) % group.size
        passing, spare = kv.clone(), torch.empty_like(kv)
        o, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -math.inf)
        for t in range(n):
            if t < n - 1:
                message = comm.exchange(passing, spare, group, right, left, 0, async_op=True)
            more, more_lse = block_forward(q, passing)
            o += torch.sigmoid(more_lse - lse) * (more - o)
            lse = torch.logaddexp(lse, more_lse)
            if t < n - 1:
                message.wait()
                passing, spare = spare, passing
        ctx.save_for_backward(q, kv, o, lse)
        ctx.group = group
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients (dq_BHsK, dkv_2BHsK, None) of this rank's queries, keys and values."""
        raise NotImplementedError(
            "send kv round as forward does, and sum the dq of all blocks; then let dkv follow"
        )


def ring_attention(q_BHsK: Tensor, kv_2BHsK: Tensor, group: Group) -> Tensor:
    """Return attention of this rank's queries to the keys of all ranks, o_BHsK."""
    return RingAttention.apply(q_BHsK, kv_2BHsK, group)
