"""Causal ring attention, forward and backward: queries stay, blocks of keys and values go round the ring.

    rank 0   chunks 0 and 3      rank 1   chunks 1 and 2            zigzag: equal work under the causal mask

A block adds exp(score - m) v to the result and exp(score - m) to its norm, m the largest score so far. Backward,
the gradients dk and dv of a block travel with it. After n steps all is home again.
S tokens, s = S / n of them here, at places_s of the sequence. H features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.spot.run import Run

MESH = dict(sp=2)
TOKENS, FEATURES, WORDS = 16, 8, 9
SCALE = FEATURES**-0.5


def scores(q_sH: Tensor, k_sH: Tensor, places_s: Tensor, keys_s: Tensor) -> Tensor:
    """Return the scores of queries at places_s and keys at keys_s; -inf for keys that come later."""
    return (q_sH @ k_sH.T * SCALE).masked_fill(keys_s[None] > places_s[:, None], -math.inf)


class Ring(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks."""

    @staticmethod
    def forward(ctx: Any, q_sH: Tensor, k_sH: Tensor, v_sH: Tensor, places_s: Tensor, group: Group) -> Tensor:
        kv_2sH, keys_s = torch.stack([k_sH, v_sH]), places_s
        top_s1, out_sH = torch.full_like(q_sH[:, :1], -math.inf), torch.zeros_like(q_sH)
        norm_s1 = torch.zeros_like(top_s1)
        for _ in range(group.size):
            score_ss = scores(q_sH, kv_2sH[0], places_s, keys_s)
            new_s1 = torch.maximum(top_s1, score_ss.amax(1, keepdim=True))
            p_ss, factor_s1 = torch.exp(score_ss - new_s1), torch.exp(top_s1 - new_s1)
            norm_s1 = norm_s1 * factor_s1 + p_ss.sum(1, keepdim=True)
            out_sH = out_sH * factor_s1 + p_ss @ kv_2sH[1]
            top_s1 = new_s1
            kv_2sH, keys_s = comm.shift(kv_2sH, group), comm.shift(keys_s, group)
        out_sH = out_sH / norm_s1
        ctx.save_for_backward(q_sH, k_sH, v_sH, out_sH, top_s1 + norm_s1.log(), places_s)
        ctx.group = group
        return out_sH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_sH, k_sH, v_sH, out_sH, log_s1, places_s = ctx.saved_tensors
        delta_s1 = (gradients[0] * out_sH).sum(1, keepdim=True)
        kv_2sH, keys_s = torch.stack([k_sH, v_sH]), places_s
        dq_sH, dkv_2sH = torch.zeros_like(q_sH), torch.zeros_like(kv_2sH)
        for _ in range(ctx.group.size):
            p_ss = torch.exp(scores(q_sH, kv_2sH[0], places_s, keys_s) - log_s1)
            dp_ss = gradients[0] @ kv_2sH[1].T
            ds_ss = p_ss * (dp_ss - delta_s1) * SCALE
            dq_sH += ds_ss @ kv_2sH[0]
            dkv_2sH += torch.stack([ds_ss.T @ q_sH, p_ss.T @ gradients[0]])
            kv_2sH, keys_s, dkv_2sH = (comm.shift(x, ctx.group) for x in (kv_2sH, keys_s, dkv_2sH))
        return dq_sH, dkv_2sH[0], dkv_2sH[1], None, None


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("sp")
    words, positions = nn.Embedding(WORDS, FEATURES), nn.Embedding(TOKENS, FEATURES)
    to_qkv, head = nn.Linear(FEATURES, 3 * FEATURES, bias=False), nn.Linear(FEATURES, WORDS)
    model = nn.ModuleDict({"words": words, "positions": positions, "to_qkv": to_qkv, "head": head})
    optimizer = run.optimizer(model)
    draw = torch.Generator().manual_seed(1)
    chunks = torch.arange(TOKENS).chunk(2 * group.size)
    places_s = torch.cat([chunks[group.rank], chunks[-1 - group.rank]])
    for _ in range(run.steps):
        words_S = torch.randint(WORDS, (TOKENS,), generator=draw)  # the same on every rank
        targets_S = words_S.cumsum(0) % WORDS
        targets_S[-6:] = -100  # the sequence ends early
        optimizer.zero_grad()
        x_sH = words(words_S[places_s]) + positions(places_s)
        y_sH = x_sH + Ring.apply(*to_qkv(x_sH).chunk(3, 1), places_s, group)
        loss = F.cross_entropy(head(y_sH), targets_S[places_s], reduction="sum")
        loss = loss / (targets_S >= 0).sum()
        loss.backward()
        for p in model.parameters():
            comm.all_reduce(p.grad, group)
        optimizer.step()
        total = loss.detach()
        comm.all_reduce(total, group)
        yield total
