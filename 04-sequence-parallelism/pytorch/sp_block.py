"""Attention of some queries to a block of keys: the result and its log-sum-exp, by which blocks are merged.

    o = softmax(q k^T / sqrt(K)) v          lse = log sum exp(q k^T / sqrt(K))          over the keys of this block

    two blocks of keys, one row of queries:     w = exp(lse_2) / (exp(lse_1) + exp(lse_2)) = sigmoid(lse_2 - lse_1)
                                                o = o_1 + w (o_2 - o_1)      lse = log(exp(lse_1) + exp(lse_2))

So a rank that sees the keys block after block keeps only o and lse of the blocks before (Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867). In the backward pass, the o and
lse of *all* keys suffice to compute a block's share of the gradients:

    p = exp(q k^T / sqrt(K) - lse)     dv = p^T do     ds = p (do v^T - rowsum(do o))     dq = ds k     dk = ds^T q

where ds is still to be divided by sqrt(K) (Dao, "FlashAttention-2", arXiv:2307.08691, section 3.1 and
algorithm 2).

Kernels: `hand` computes these equations with B H S T scores in memory, on any device and in any type.
`library` is torch's FlashAttention for CPUs, which cuts the scores into tiles that stay in cache. Their
results are the same.

    B batch  H query heads  G key-value heads  S queries  T keys  K width of a head
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from common.errors import UsageError

Kernel = Literal["hand", "library"]
Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Block:
    """Attention kernel for one block of keys.

    forward(q_BHSK, k_BGTK, v_BGTK, causal) -> (o_BHSK, lse_BHS)
    backward(do_BHSK, q_BHSK, o_BHSK, lse_BHS, k_BGTK, v_BGTK, causal) -> (dq_BHSK, dk_BGTK, dv_BGTK)

    Query head h reads key-value head h // (H / G). With `causal`, S = T and query i sees keys 0 to i.
    """

    forward: Forward
    backward: Backward


def _rows(x_BHS: Tensor, heads: int) -> Tensor:
    """Return the queries of the heads that share a key-value head, head after head: [B, G, H/G * S, ...]."""
    rows: Tensor = x_BHS.unflatten(1, (heads, -1))
    return rows.flatten(2, 3)


def _scores(q_BGRK: Tensor, k_BGTK: Tensor, causal: bool) -> Tensor:
    """Return q k^T / sqrt(K), minus infinity where a query does not see the key."""
    scores_BGRT = q_BGRK @ k_BGTK.transpose(-1, -2) / math.sqrt(q_BGRK.shape[-1])
    if causal:
        T = k_BGTK.shape[2]
        later_TT = torch.ones(T, T, dtype=torch.bool, device=q_BGRK.device).triu(1)
        scores_BGRT.unflatten(2, (-1, T)).masked_fill_(later_TT, -math.inf)
    return scores_BGRT


def hand_forward(q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute (o_BHSK, lse_BHS) by the equations above."""
    scores_BGRT = _scores(_rows(q_BHSK, k_BGTK.shape[1]), k_BGTK, causal)
    lse_BGR = scores_BGRT.logsumexp(-1)
    o_BGRK = (scores_BGRT - lse_BGR[..., None]).exp() @ v_BGTK
    return o_BGRK.reshape(q_BHSK.shape), lse_BGR.reshape(q_BHSK.shape[:3])


def hand_backward(
    do_BHSK: Tensor,
    q_BHSK: Tensor,
    o_BHSK: Tensor,
    lse_BHS: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) by the equations above; ds^T q and p^T do sum over heads that share keys."""
    G = k_BGTK.shape[1]
    q_BGRK, do_BGRK = _rows(q_BHSK, G), _rows(do_BHSK, G)
    p_BGRT = (_scores(q_BGRK, k_BGTK, causal) - _rows(lse_BHS, G)[..., None]).exp()
    dv_BGTK = p_BGRT.transpose(-1, -2) @ do_BGRK
    rowsum_BGR1 = _rows((do_BHSK * o_BHSK).sum(-1), G)[..., None]
    ds_BGRT = p_BGRT * (do_BGRK @ v_BGTK.transpose(-1, -2) - rowsum_BGR1) / math.sqrt(q_BHSK.shape[-1])
    dq_BHSK = (ds_BGRT @ k_BGTK).reshape(q_BHSK.shape)
    return dq_BHSK, ds_BGRT.transpose(-1, -2) @ q_BGRK, dv_BGTK


def _dense(x: Tensor) -> Tensor:
    """Return x with the numbers of a head contiguous: the library's kernel assumes this without checking."""
    return x if x.stride(-1) == 1 else x.contiguous()


def library_forward(q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Call scaled_dot_product_attention's CPU kernel, which also returns lse: (o_BHSK, lse_BHS)."""
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o_BHSK, lse_BHS = flash(*map(_dense, (q_BHSK, k_BGTK, v_BGTK)), 0.0, causal)
    return o_BHSK, lse_BHS


def library_backward(
    do_BHSK: Tensor,
    q_BHSK: Tensor,
    o_BHSK: Tensor,
    lse_BHS: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call that kernel's backward pass, with the o and lse of all keys; return (dq, dk, dv)."""
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    qkvo = map(_dense, (q_BHSK, k_BGTK, v_BGTK, o_BHSK))
    dq_BHSK, dk_BGTK, dv_BGTK = flash(_dense(do_BHSK), *qkvo, lse_BHS, 0.0, causal)
    return dq_BHSK, dk_BGTK, dv_BGTK


KERNELS: dict[Kernel, Block] = {
    "hand": Block(hand_forward, hand_backward),
    "library": Block(library_forward, library_backward),
}


def block(kernel: Kernel, device: torch.device) -> Block:
    """Return the kernel of that name. Raises UsageError for `library` on any device but a CPU."""
    if kernel == "library" and device.type != "cpu":
        raise UsageError(f"kernel 'library' runs on CPUs, not on {device.type}; give 'hand'")
    return KERNELS[kernel]


def merge_(o_BHSK: Tensor, lse_BHS: Tensor, more_BHSK: Tensor, more_lse_BHS: Tensor) -> None:
    """Merge a block of keys into (o, lse), in place: both then cover the old keys and the new block."""
    o_BHSK.lerp_(
        more_BHSK.to(o_BHSK.dtype), torch.sigmoid(more_lse_BHS - lse_BHS)[..., None].to(o_BHSK.dtype)
    )
    lse_BHS.copy_(torch.logaddexp(lse_BHS, more_lse_BHS))
