"""One forward pass over tokens of many sequences, with the cache in place of the tokens before them.

    sequence    a a a   b   c            T tokens of a step in one row: x_1TD, so every product of the model runs
    position    0 1 2   7   4            once for all of them; attention alone runs per part
    part        \\_n=3/  \\_n=1_/          a part: R sequences with n tokens each

    scores of a part      q_RGmK  x  k_RGLK         m = n * H / G: the query heads that read one key-value head
    visible               key's position <= query's position

Embedding and head stay as tensor parallelism has split them for training; infer_layers.py has the attention that reads
the cache, and what else differs. Attention takes R * L * G * K numbers from the cache in each layer, and is the only
part that grows with the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

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
    cos_T1K: Tensor
    sin_T1K: Tensor
    last_R: Tensor
    parts: list[Part]
    sequences: list[Sequence]


def make_step(
    scheduled: Row[tuple[Sequence, int]],
    block: int,
    shared: int,
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> Step:
    """Return the step that computes these sequences' next tokens.

    block: tokens per block of the cache. shared: query heads that read one key-value head. rotary: cosine and sine,
    [1, T, K], for positions_T. dtype: of attention.
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
        seen_Rm = put([[s.cached + i for _ in range(shared) for i in range(n)] for s in members])
        later_RmL = torch.arange(longest * block, device=device) > seen_Rm[..., None]
        mask_RmL = torch.zeros(later_RmL.shape, dtype=dtype, device=device).masked_fill_(
            later_RmL, -torch.inf
        )
        tables_RN = put([s.table + [0] * (longest - len(s.table)) for s in members])
        slots_RL = (tables_RN[..., None] * block + torch.arange(block, device=device)).flatten(1)
        parts.append(Part(begin, len(tokens), slots_RL, mask_RmL[:, None]))
    positions_1T = put([positions])
    cos_T1K, sin_T1K = (x_1TK.transpose(0, 1) for x_1TK in rotary(positions_1T[0]))
    return Step(put([tokens]), positions_1T, put(slots), cos_T1K, sin_T1K, put(last), parts, sequences)
