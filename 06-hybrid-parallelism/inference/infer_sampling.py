"""Choose the next token of each sequence from its logits: greedy, temperature, top-k, top-p.

                  likeliest first      .4   .3   .2   .1
    top_k = 3     renormalised         .44  .33  .22             the k likeliest
    top_p = 0.7   of these             .44  .33                  the fewest whose sum reaches 0.7
    draw          u = 0.6 of .77            ^                    where the running sum passes u

The draw u is a function of (seed of the request, place in the text), without a generator's state. So a request's text
depends neither on the mesh nor on the other requests of the batch, up to a draw that falls within rounding of the
border between two tokens. Top-p, or nucleus sampling, is of Holtzman et al., 2019, arXiv:1904.09751.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

import numpy as np
import torch
from torch import Tensor

from common import random
from common.errors import UsageError

from infer_scheduler import Request, Sequence

STREAM = random.stream_of("generated token")


def choose(logits_RV: Tensor, sequences: Row[Sequence]) -> Tensor:
    """Return the next token of each sequence, [R] on the CPU. logits_RV: those after its last token, in its row.

    Raises UsageError if they are not numbers.
    """
    logits_RV = logits_RV.to("cpu", torch.float64)
    if logits_RV.isnan().any():
        raise UsageError("the model's logits are not numbers: are its weights?")
    chosen_R = logits_RV.argmax(-1)
    if drawn := [r for r, s in enumerate(sequences) if s.request.temperature > 0]:
        chosen_R[drawn] = draw(logits_RV[drawn], [sequences[r] for r in drawn])
    return chosen_R


def draw(logits_RV: Tensor, sequences: Row[Sequence]) -> Tensor:
    """Return a token for each row, drawn with the request's temperature, top-k and top-p."""
    share_RV, token_RV = shares(logits_RV, [s.request for s in sequences])
    u_R = np.concatenate([random.uniform(s.request.seed, STREAM, len(s.text)) for s in sequences])
    ends_RV = share_RV.cumsum(-1)
    place_R1 = torch.searchsorted(ends_RV, torch.from_numpy(u_R)[:, None] * ends_RV[:, -1:], right=True)
    last_R1 = (share_RV > 0).sum(-1, keepdim=True) - 1  # a product may round up to the whole sum
    return token_RV.gather(1, place_R1.minimum(last_R1))[:, 0]


def shares(logits_RV: Tensor, requests: Row[Request]) -> tuple[Tensor, Tensor]:
    """Return (probabilities, tokens), the likeliest first. Tokens that are not drawn have 0; the sum may be below 1."""
    temperature_R1, top_p_R1 = (
        torch.tensor([[value] for value in values], dtype=torch.float64)
        for values in ([q.temperature for q in requests], [q.top_p for q in requests])
    )
    place_V = torch.arange(logits_RV.shape[1])
    top_k_R1 = torch.tensor([[q.top_k or len(place_V)] for q in requests])
    # a tiny temperature must not make infinities of the largest logits
    below_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
    sorted_RV, token_RV = (below_RV / temperature_R1).sort(dim=-1, descending=True, stable=True)
    share_RV = sorted_RV.masked_fill(place_V >= top_k_R1, -torch.inf).softmax(-1)
    before_RV = share_RV.cumsum(-1) - share_RV
    return share_RV.where((before_RV < top_p_R1) | (place_V == 0), 0), token_RV
