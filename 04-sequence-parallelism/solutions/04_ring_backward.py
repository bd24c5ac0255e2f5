"""Backward pass of ring attention: dq stays, own dkv stays, the dkv of others follow their keys and gain a term."""

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
        (q, kv, o, lse), group = ctx.saved_tensors, ctx.group
        n, right, left = group.size, (group.rank + 1) % group.size, (group.rank - 1) % group.size
        passing, spare = kv.clone(), torch.empty_like(kv)
        dkv, room, follows = torch.zeros_like(kv), torch.empty_like(kv), None
        for t in range(n):
            if t < n - 1:
                message = comm.exchange(passing, spare, group, right, left, 0, async_op=True)
            dq_term, dkv_term = block_backward(do, q, o, lse, passing)
            if t == 0:
                dq, own = dq_term, dkv_term
            else:
                if follows:
                    follows.wait()
                    dkv, room = room, dkv
                dq += dq_term
                dkv += dkv_term
                follows = comm.exchange(dkv, room, group, right, left, 1, async_op=True)
            if t < n - 1:
                message.wait()
                passing, spare = spare, passing
        if follows:
            follows.wait()
            own += room
        return dq, own, None


def ring_attention(q_BHsK: Tensor, kv_2BHsK: Tensor, group: Group) -> Tensor:
    """Return attention of this rank's queries to the keys of all ranks, o_BHsK."""
    return RingAttention.apply(q_BHsK, kv_2BHsK, group)
