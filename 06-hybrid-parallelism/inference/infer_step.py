"""One forward pass over tokens of many sequences, with the cache in place of the tokens before them.

    sequence    a a a   b   c            T tokens of a step in one row: x_1TD, so every product of the model runs
    position    0 1 2   7   4            once for all of them; attention alone runs per part
    part        \\_n=3/  \\_n=1_/          a part: R sequences with n tokens each

    scores of a part      q_RGmK  x  k_RGLK         m = n * H / G: the query heads that read one key-value head
    visible               key's position <= query's position

The seam of the model is `Attention.attend`: all else, and all that tensor parallelism has done to it, stays as in
training. Attention takes R * L * G * K numbers from the cache in each layer, and is the only part that grows with the
text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Row
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.transformer import angles

from infer_cache import Cache
from infer_scheduler import Sequence


@dataclass
class Part:
    """Sequences that compute equally many tokens, in rows [begin, end) of the step."""

    begin: int
    end: int
    slots_RL: Tensor
    """All rows of the sequences' blocks, in the order of their tables."""
    mask_R1mL: Tensor
    """0 where a key is not later than the query, else minus infinity; rows beyond the text are later."""


@dataclass
class Step:
    """Tokens of a forward pass. Rows `last_R` are those after which a token is chosen, for `sequences` in order."""

    tokens_1T: Tensor
    positions_1T: Tensor
    slots_T: Tensor
    last_R: Tensor
    parts: list[Part]
    sequences: list[Sequence]


def make_step(
    scheduled: Row[tuple[Sequence, int]], block: int, shared: int, dtype: torch.dtype, device: torch.device
) -> Step:
    """Return the step that computes these sequences' next tokens.

    block: tokens per block of the cache. shared: query heads that read one key-value head. dtype: of attention.
    """
    put = partial(torch.tensor, dtype=torch.int64, device=device)
    in_parts = sorted(scheduled, key=lambda pair: -pair[1])  # stable: a part keeps the order of the sequences
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    parts, sequences = [], []
    for n, of_part in itertools.groupby(in_parts, key=lambda pair: pair[1]):
        members = [sequence for sequence, _ in of_part]
        begin = len(tokens)
        for s in members:
            places = range(s.cached, s.cached + n)
            tokens += s.text[s.cached : s.cached + n]
            positions += places
            slots += [s.table[p // block] * block + p % block for p in places]
            if s.cached + n == len(s.text):
                last.append(len(tokens) - 1)
                sequences.append(s)
        longest = max(len(s.table) for s in members)
        first_R = put([s.cached for s in members])
        seen_R1n1 = (first_R[:, None] + torch.arange(n, device=device))[:, None, :, None]
        later_R1nL = torch.arange(longest * block, device=device) > seen_R1n1
        mask_R1nL = torch.zeros(later_R1nL.shape, dtype=dtype, device=device).masked_fill_(
            later_R1nL, -torch.inf
        )
        tables_RN = put([s.table + [0] * (longest - len(s.table)) for s in members])
        slots_RL = (tables_RN[..., None] * block + torch.arange(block, device=device)).flatten(1)
        parts.append(Part(begin, len(tokens), slots_RL, mask_R1nL.repeat(1, 1, shared, 1)))
    return Step(put([tokens]), put([positions]), put(slots), put(last), parts, sequences)


class SharedAngles:
    """`Attention.angles` of all layers: the same for all of them, so computed by the first one of a pass."""

    positions_1T: Tensor | None = None

    def __call__(self, x_1HTK: Tensor, positions_1T: Tensor, base: float) -> tuple[Tensor, Tensor]:
        if positions_1T is not self.positions_1T:
            self.positions_1T, self.found = positions_1T, angles(x_1HTK, positions_1T, base)
        return self.found


class CachedAttention:
    """`Attention.attend` of one layer: stores the step's keys and values, and attends to all that are cached."""

    step: Step  # of all layers; set before each forward pass

    def __init__(self, cache: Cache, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def __call__(self, q_1HTK: Tensor, k_1GTK: Tensor, v_1GTK: Tensor, _: bool) -> Tensor:
        parts = self.step.parts
        self.cache.write(self.layer, self.step.slots_T, k_1GTK, v_1GTK)
        H, K, G = q_1HTK.shape[1], q_1HTK.shape[3], k_1GTK.shape[1]
        q_GhTK = q_1HTK.reshape(G, H // G, -1, K)
        y_GhTK = [self.attend(part, q_GhTK[:, :, part.begin : part.end]) for part in parts]
        return (torch.cat(y_GhTK, 2) if len(parts) > 1 else y_GhTK[0]).reshape(1, H, -1, K)

    def attend(self, part: Part, q_GhTK: Tensor) -> Tensor:
        """Return the attention of a part's tokens, [G, h, T, K]."""
        k_RGLK, v_RGLK = self.cache.read(self.layer, part.slots_RL)
        (G, h, T, K), R = q_GhTK.shape, len(part.slots_RL)
        q_RGmK = q_GhTK.reshape(G, h, R, T // R, K).permute(2, 0, 1, 3, 4).reshape(R, G, -1, K)
        y_RGmK = F.scaled_dot_product_attention(q_RGmK, k_RGLK, v_RGLK, part.mask_R1mL)
        return y_RGmK.reshape(R, G, h, -1, K).permute(1, 2, 0, 3, 4).reshape(G, h, T, K)
