"""Grouped-query attention with fewer key-value heads than ranks: all ranks share one.

    rank 0   queries of heads 0 and 1, keys and values of the one head
    rank 1   queries of heads 2 and 3, the same keys and values

The weights of keys and values are replicated, and each rank uses them for its own queries. S tokens, D features,
N heads, h = N / n of them here, H features per head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import collectives
from common.comm.placement import shard
from common.spot.run import Run

MESH = dict(tp=2)
TOKENS, FEATURES, HEADS, HEAD_FEATURES = 9, 6, 4, 3


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("tp")
    width = HEADS * HEAD_FEATURES
    q, k, v = (nn.Parameter(torch.randn(FEATURES, n) / 2) for n in (width, HEAD_FEATURES, HEAD_FEATURES))
    out = nn.Parameter(torch.randn(width, FEATURES) / 4)
    model = nn.ParameterDict({"q": shard(q, group, 1), "k": k, "v": v, "out": shard(out, group, 0)})
    optimizer = run.optimizer(model)
    draw = torch.Generator().manual_seed(1)
    for _ in range(run.steps):
        x_SD = torch.randn(TOKENS, FEATURES, generator=draw)  # the same on every rank
        optimizer.zero_grad()
        q_hSH = (x_SD @ model["q"]).unflatten(1, (-1, HEAD_FEATURES)).transpose(0, 1)
        k_SH, v_SH = (x_SD @ collectives.copy(model[name], group) for name in ("k", "v"))
        y_hSH = F.scaled_dot_product_attention(
            q_hSH, k_SH.expand_as(q_hSH), v_SH.expand_as(q_hSH), is_causal=True
        )
        y_Sd = y_hSH.transpose(0, 1).flatten(1)  # d: the features of this rank's heads
        y_SD = collectives.reduce(y_Sd @ model["out"], group)
        loss = F.mse_loss(y_SD, x_SD.cumsum(0).tanh())
        loss.backward()
        optimizer.step()
        yield loss.detach()
