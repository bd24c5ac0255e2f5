"""Cross-entropy over a split vocabulary: each rank has the logits of v = V / n words.

    loss = log( sum over all words of exp(logit - m) ) + m - logit of the target         m: the largest logit

Three numbers per token travel: m, the sum, and the target's logit. T tokens, D features, V words.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives
from common.comm.placement import shard
from common.spot.run import Run

MESH = dict(tp=2)
TOKENS, FEATURES, WORDS = 24, 6, 10


def cross_entropy(logits_Tv: Tensor, targets_T: Tensor, group: Group) -> Tensor:
    """Return the mean loss over the tokens, from this rank's logits."""
    v = logits_Tv.shape[1]
    largest_T = logits_Tv.detach().amax(1)
    comm.all_reduce(largest_T, group, "max")
    total_T = collectives.reduce(torch.exp(logits_Tv - largest_T[:, None]).sum(1), group)
    column_T = targets_T - group.rank * v
    here_T = (column_T >= 0) & (column_T < v)
    picked_T = logits_Tv.gather(1, column_T.clamp(0, v - 1)[:, None]).squeeze(1)
    target_T = collectives.reduce(picked_T.where(here_T, 0.0), group)
    return (total_T.log() + largest_T - target_T).mean()


def train(run: Run) -> Iterator[Tensor]:
    """Train; yield the loss of each batch."""
    group = run.mesh.group("tp")
    model = nn.ModuleDict({"embed": nn.Embedding(WORDS, FEATURES), "middle": nn.Linear(FEATURES, FEATURES)})
    head = nn.ParameterDict({"head": shard(nn.Parameter(torch.randn(WORDS, FEATURES)), group, 0)})
    model["words"] = head
    optimizer = run.optimizer(model)
    draw = torch.Generator().manual_seed(1)
    for _ in range(run.steps):
        words_T = torch.randint(WORDS, (TOKENS,), generator=draw)  # the same on every rank
        optimizer.zero_grad()
        x_TD = F.gelu(model["middle"](model["embed"](words_T)))
        logits_Tv = collectives.copy(x_TD, group) @ head["head"].T
        loss = cross_entropy(logits_Tv, (3 * words_T + 1) % WORDS, group)
        loss.backward()
        optimizer.step()
        yield loss.detach()
