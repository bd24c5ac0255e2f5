"""Ulysses: an all-to-all exchanges pieces of the sequence for heads, so that attention sees all tokens of its heads.

    before   s tokens, all N heads         inside   all S tokens, h heads        after   s tokens, all N heads

S tokens, s = S / n of them here, N heads, h = N / n, H features per head, D = N H.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives
from common.spot.run import Run

MESH = dict(sp=2)
TOKENS, HEADS, HEAD_FEATURES = 8, 4, 3
FEATURES = HEADS * HEAD_FEATURES


def attention(q_sNH: Tensor, k_sNH: Tensor, v_sNH: Tensor, group: Group) -> Tensor:
    """Return causal attention of this rank's tokens, all heads."""
    n, s = group.size, q_sNH.shape[0]
    qkv_s3NH = torch.stack([q_sNH, k_sNH, v_sNH], 1)
    to_ranks = qkv_s3NH.unflatten(2, (n, -1)).movedim(2, 0)  # n, s, 3, h, H: a piece for each rank
    q_hSH, k_hSH, v_hSH = collectives.all_to_all(to_ranks.flatten(0, 1), group).permute(1, 2, 0, 3)
    out_hSH = F.scaled_dot_product_attention(q_hSH, k_hSH, v_hSH, is_causal=True)
    of_ranks = collectives.all_to_all(out_hSH.transpose(0, 1), group).unflatten(0, (n, s))  # n, s, h, H
    return of_ranks.movedim(0, 1).flatten(1, 2)


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("sp")
    to_qkv, out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
    positions = nn.Embedding(TOKENS, FEATURES)
    model = nn.ModuleDict({"to_qkv": to_qkv, "out": out, "positions": positions})
    optimizer = run.optimizer(model)
    draw = torch.Generator().manual_seed(1)
    places_s = torch.arange(TOKENS).chunk(group.size)[group.rank]
    for _ in range(run.steps):
        x_SD = torch.randn(TOKENS, FEATURES, generator=draw)  # the same on every rank
        y_SD = x_SD.cumsum(0).tanh()
        optimizer.zero_grad()
        x_sD = x_SD[places_s] + positions(places_s)
        q, k, v = to_qkv(x_sD).unflatten(1, (3, HEADS, HEAD_FEATURES)).unbind(1)
        z_sD = out(attention(q, k, v, group).flatten(1))
        loss = F.mse_loss(z_sD, y_SD[places_s], reduction="sum") / y_SD.numel()
        loss.backward()
        for p in model.parameters():
            comm.all_reduce(p.grad, group)
        optimizer.step()
        total = loss.detach()
        comm.all_reduce(total, group)
        yield total
