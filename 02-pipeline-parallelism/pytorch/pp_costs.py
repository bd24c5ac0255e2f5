"""Bytes that a rank sends in a step of chapter 02's lessons, by formula; nothing here starts a rank.

B batch  S sequence  D width  n ranks
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from torch import nn

from common.comm import Group
from common.lesson.comparison import Formula
from common.lesson.runner import DTYPES
from common.models.transformer import Transformer

from pp_kind import Kind


def sides(owner: Sequence[int], rank: int) -> int:
    """Return the number of sides on which the rank's stages have a neighbour on another rank.

    owner: the rank of each stage.
    """
    return sum(rank in border for border in itertools.pairwise(owner) if len(set(border)) > 1)


def step_bytes(kinds: Mapping[str, Kind]) -> Formula:
    """Return the formula of a step, given the kind of schedule of each version.

    The bytes are B S D numbers for each side on which a stage has a neighbour on another rank; the loss (one
    number, all-reduced); and the gradient of a tied head on the two ranks that have it.
    """

    def formula(name: str, model: nn.Module, group: Group, o: Any) -> Fraction:
        assert isinstance(model, Transformer)
        c, size, owner = model.config, DTYPES[o.dtype].itemsize, kinds[name].owner(group.size, o.chunks)
        sent = Fraction(sides(owner, group.rank) * o.batch * o.sequence * c.width * size)
        if c.tied and owner[0] != owner[-1] and group.rank in (owner[0], owner[-1]):
            sent += c.vocabulary * c.width * size
        return sent + Fraction(2 * (group.size - 1) * size, group.size)

    return formula
