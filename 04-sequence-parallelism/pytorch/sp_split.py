"""Which tokens of a sequence a rank holds, and where they stand in it.

    order         pieces of 8 tokens on 2 ranks      causal work (query-key pairs)
    contiguous    rank 0: 0 1 2 3                    10
                  rank 1: 4 5 6 7                    26
    zigzag        rank 0: 0 1 6 7                    18     chunks r and 2n-1-r of 2n
                  rank 1: 2 3 4 5                    18

A token is embedded, normed, projected and scored alone, so a rank needs nothing of the others for that; only its
position must come along. The targets are shifted before the cut, so the last token of a piece has the first of the next
as its target. The loss is a sum over tokens, divided by the targets of all ranks: pieces may hold unequal numbers.

    B batch  S sequence  s a rank's tokens
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from common.comm import Group
from common.errors import UsageError
from common.models.configs import TransformerConfig

Order = Literal["contiguous", "zigzag"]


def chunks(order: Order, rank: int, size: int) -> tuple[int, ...]:
    """The chunks that rank `rank` of `size` holds, in rising order: of `size` chunks, or of 2 * `size` for zigzag."""
    return (rank, 2 * size - 1 - rank) if order == "zigzag" else (rank,)


def check_length(length: int, order: Order, size: int, longest: int | None = None, inner: int = 1) -> None:
    """Raises UsageError where `length` tokens are over `longest`, or do not divide into the chunks of `size` ranks.

    inner: a rank's piece must divide by it, too.
    """
    if longest is not None and length > longest:
        raise UsageError(
            f"a sequence of {length} tokens is too long for a model with {longest} learned positions"
        )
    parts = size * math.lcm(len(chunks(order, 0, size)), inner)
    if length % parts or length < 1:
        below = length // parts * parts
        fits = " or ".join(str(fit) for fit in (below, below + parts) if fit > 0)
        raise UsageError(
            f"a sequence of {length} tokens does not divide into {parts} pieces, which {order} order on "
            f"{size * inner} ranks needs; {fits} would"
        )


def places(length: int, group: Group, order: Order) -> Tensor:
    """Indices, in rising order, of this rank's tokens among `length`. Raises UsageError where it does not divide."""
    check_length(length, order, group.size)
    mine = chunks(order, group.rank, group.size)
    return torch.arange(length).view(group.size * len(mine), -1)[list(mine)].flatten()


def longest_sequence(config: TransformerConfig) -> int | None:
    """Tokens that a model with learned positions can tell apart; None with rotary ones."""
    return config.sequence if config.positions == "learned" else None


def split_sequence(
    tokens_BS: Tensor,
    targets_BS: Tensor,
    group: Group,
    order: Order = "contiguous",
    longest: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's (tokens_Bs, positions_s, targets_Bs), for `model(tokens_Bs, positions_s)`.

    longest: learned positions of the model, `longest_sequence(config)`; the model itself sees s tokens alone and cannot
    check. Raises UsageError for a sequence that is longer, or that does not divide by n (2n for zigzag).
    """
    check_length(tokens_BS.shape[1], order, group.size, longest)
    positions_s = places(tokens_BS.shape[1], group, order).to(tokens_BS.device)
    return tokens_BS[:, positions_s], positions_s, targets_BS[:, positions_s]
