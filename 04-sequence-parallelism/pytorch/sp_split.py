"""Split of a sequence over ranks: the tokens that a rank holds, and their positions.

    order         pieces of 8 tokens on 2 ranks      causal work (query-key pairs)
    contiguous    rank 0: 0 1 2 3                    10
                  rank 1: 4 5 6 7                    26
    zigzag        rank 0: 0 1 6 7                    18     chunks r and 2n-1-r of 2n
                  rank 1: 2 3 4 5                    18

Embedding, norms, projections and loss work on each token alone, so a rank needs no other rank's tokens for
them; only the token's position must be given. The targets are shifted before the cut, so the target of a
piece's last token is the first token of the next piece. The loss is a sum over tokens, divided by the number
of targets of all ranks, so pieces may hold unequal numbers of targets.

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
ALONE = Group.alone()


def chunks(order: Order, rank: int, size: int) -> tuple[int, ...]:
    """Return the chunks of rank `rank` of `size`, rising: of `size` chunks, or 2 * `size` for zigzag."""
    return (rank, 2 * size - 1 - rank) if order == "zigzag" else (rank,)


def check_length(length: int, order: Order, size: int, longest: int | None = None, inner: int = 1) -> None:
    """Raise UsageError if `length` is over `longest`, or does not divide into the chunks of `size` ranks.

    inner: a number that must divide each rank's piece, too.
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


def places(length: int, group: Group, order: Order, inner: Group = ALONE) -> Tensor:
    """Return rising indices of this rank's tokens among `length`. Raises UsageError as `check_length`.

    inner: ranks that cut the tokens of a rank of `group` again, in contiguous order.
    """
    check_length(length, order, group.size, inner=inner.size)
    mine = chunks(order, group.rank, group.size)
    of_group = torch.arange(length).view(group.size * len(mine), -1)[list(mine)]
    return of_group.view(inner.size, -1)[inner.rank]


def longest_sequence(config: TransformerConfig) -> int | None:
    """Return the number of learned positions of a model; None with rotary positions."""
    return config.sequence if config.positions == "learned" else None


def split_sequence(
    tokens_BS: Tensor,
    targets_BS: Tensor,
    group: Group,
    order: Order = "contiguous",
    longest: int | None = None,
    inner: Group = ALONE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's (tokens_Bs, positions_s, targets_Bs), for `model(tokens_Bs, positions_s)`.

    longest: learned positions of the model, `longest_sequence(config)`; the model sees only s tokens and
    cannot check the length itself. inner: as for `places`. Raises UsageError for a longer sequence, and for one
    that n (2n for zigzag) does not divide.
    """
    check_length(tokens_BS.shape[1], order, group.size, longest, inner.size)
    positions_s = places(tokens_BS.shape[1], group, order, inner).to(tokens_BS.device)
    return tokens_BS[:, positions_s], positions_s, targets_BS[:, positions_s]
