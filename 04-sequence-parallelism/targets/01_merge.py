"""Targets of the merge: the example, blocks in any order, scores of any size, hidden rows, tensors left alone.

B batch  H heads  S queries  T keys  K width of a head
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.comm import Group
from common.grade.targets import Wrong, holds, same, target, unchanged

Block = tuple[Tensor, Tensor]


def attention(scores_ST: Tensor, v_TK: Tensor) -> Block:
    """Return (o_SK, lse_S) of attention with the given scores; rows that see no key have o = 0, lse = -inf."""
    hidden_S = (scores_ST == -math.inf).all(-1)
    o_SK = scores_ST.masked_fill(hidden_S[..., None], 0).softmax(-1) @ v_TK
    return o_SK.masked_fill(hidden_S[..., None], 0), scores_ST.logsumexp(-1)


def blocks(scores_ST: Tensor, v_TK: Tensor, sizes: Sequence[int]) -> list[Block]:
    """Return attention to each block of keys alone."""
    pieces = zip(scores_ST.split(list(sizes), -1), v_TK.split(list(sizes), -2), strict=True)
    return [attention(scores, v) for scores, v in pieces]


def merged(mine: Any, one: Block, two: Block) -> Block:
    """Call the exercise. Raises Wrong unless it returns a pair (o, lse) of the right shapes."""
    pair = mine.merge(*(x.clone() for x in (*one, *two)))
    if not isinstance(pair, tuple) or [getattr(x, "shape", None) for x in pair] != [x.shape for x in one]:
        shapes = ", ".join(str(tuple(x.shape)) for x in one)
        raise Wrong(f"merge does not return a pair (o, lse) with the shapes {shapes}")
    return pair


def compare(of: str, got: Block, one: Block, two: Block, want: Block) -> None:
    """Compare a merge of two blocks with attention to both, lse first: o depends on it."""
    (o1, lse1), (o2, lse2) = one, two
    w = torch.sigmoid(lse2 - lse1)[..., None]
    lse_mistakes = {
        "the sum lse1 + lse2: the denominators add up, not their logarithms": lse1 + lse2,
        "the larger of lse1 and lse2: the other block's denominator is missing": torch.maximum(lse1, lse2),
        "the denominator itself, without the logarithm": lse1.exp() + lse2.exp(),
        "lse of the first block": lse1,
        "lse of the second block": lse2,
    }
    o_mistakes = {
        "the plain mean of o1 and o2: each block needs the weight of its denominator": (o1 + o2) / 2,
        "the sum o1 + o2: each block has been divided by its own denominator": o1 + o2,
        "merged with the weights of the two blocks swapped": o2 + w * (o1 - o2),
        "merged with lse as weights; the denominators are exp(lse)": (
            (lse1[..., None] * o1 + lse2[..., None] * o2) / (lse1 + lse2)[..., None]
        ),
        "the numerator: it is still to be divided by the denominator of both blocks": (
            lse1.exp()[..., None] * o1 + lse2.exp()[..., None] * o2
        ),
        "o of the first block": o1,
        "o of the second block": o2,
    }
    same(f"lse of {of}", got[1], want[1], lse_mistakes)
    same(f"o of {of}", got[0], want[0], o_mistakes)


@target("the example: o 17, lse ln 8")
def example(mine: Any, group: Group, rng: torch.Generator) -> None:
    """One query, four keys, and the same rows with other values."""
    scores = torch.tensor([[0, 0, math.log(2), math.log(4)]], dtype=torch.float64)
    v = torch.tensor([[8.0], [0], [16], [24]], dtype=torch.float64)
    one, two = blocks(scores, v, (2, 2))
    compare("the example", merged(mine, one, two), one, two, attention(scores, v))


@target("blocks of random scores, of other sizes")
def two_blocks(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Leading dimensions of batch and heads; the second block longer or shorter than the first."""
    for sizes in ((3, 5), (6, 1)):
        scores = 2 * torch.randn(2, 3, 4, sum(sizes), generator=rng, dtype=torch.float64)
        v = torch.randn(2, 3, sum(sizes), 5, generator=rng, dtype=torch.float64)
        one, two = blocks(scores, v, sizes)
        compare(
            f"blocks of {sizes[0]} and {sizes[1]} keys",
            merged(mine, one, two),
            one,
            two,
            attention(scores, v),
        )


@target("seven blocks, merged in any order")
def any_order(mine: Any, group: Group, rng: torch.Generator) -> None:
    """One after the other as in the ring, from the left and from the right, and pairs of pairs."""
    sizes = (2, 1, 5, 3, 1, 4, 2)
    scores = 2 * torch.randn(4, sum(sizes), generator=rng, dtype=torch.float64)
    v = torch.randn(sum(sizes), 3, generator=rng, dtype=torch.float64)
    each, want = blocks(scores, v, sizes), attention(scores, v)
    for order, every in (("from the left", each), ("from the right", each[::-1])):
        total = every[0]
        for block in every[1:]:
            total = merged(mine, total, block)
        for name, got, right in zip(("o", "lse"), total, want, strict=True):
            same(f"{name} of seven blocks merged {order}", got, right)
    while len(each) > 1:
        pairs = [merged(mine, *each[i : i + 2]) for i in range(0, len(each) - 1, 2)]
        each = pairs + each[2 * len(pairs) :]
    same("o of seven blocks merged pair by pair", each[0][0], want[0])


@target("scores near 1000 and -1000")
def any_size(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Both blocks of a row are large, both small, or one of each; rows of all kinds stand together."""
    kinds = ((1000, 1000), (-1000, -1000), (1000, -1000), (-1000, 1000), (1000, 990))
    noise = torch.randn(len(kinds), 6, generator=rng, dtype=torch.float64)
    v = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    scores = torch.stack(
        [row + torch.tensor([a] * 3 + [b] * 3) for row, (a, b) in zip(noise, kinds, strict=True)]
    )
    one, two = blocks(scores, v, (3, 3))
    want, want_lse = attention(scores, v)
    every = list(range(len(kinds)))
    for rows in (*([row] for row in every), every):
        o, lse = merged(mine, *((x[rows], y[rows]) for x, y in (one, two)))
        beside = ", beside rows of other scores," if len(rows) > 1 else ""
        for at, row in enumerate(rows):
            of = f"a row with scores near {kinds[row][0]} in block 1 and {kinds[row][1]} in block 2{beside}"
            for name, got, right in (("lse", lse[at], want_lse[row]), ("o", o[at], want[row])):
                overflow = (
                    f"{name} of {of} is {got.flatten()[0].item()}: subtract a row's largest lse before exp"
                )
                holds(bool(got.isfinite().all()), overflow)
                same(f"{name} of {of}", got, right)


@target("rows that a mask hides from one block or both")
def hidden_rows(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Row 0 sees both blocks, row 1 not the first, row 2 not the second, row 3 none."""
    scores, v = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((4, 6), (6, 3)))
    scores[1, :2] = scores[2, 2:] = scores[3] = -math.inf
    (o, lse), (want, want_lse) = merged(mine, *blocks(scores, v, (2, 4))), attention(scores, v)
    for row, of in enumerate(
        ("sees both blocks", "sees no key of block 1", "sees no key of block 2", "sees no key at all")
    ):
        for name, got in (("lse", lse[row]), ("o", o[row])):
            holds(not bool(got.isnan().any()), f"{name} of a row that {of} is NaN")
        if row == 3:
            holds(
                lse[row].item() == -math.inf,
                f"lse of a row that {of} is {lse[row].item():.6g}, -inf is needed",
            )
        else:
            same(f"lse of a row that {of}", lse[row], want_lse[row])
        same(f"o of a row that {of}", o[row], want[row])


@target("the tensors that it merges are unchanged")
def left_alone(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The result is new."""
    scores, v = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((4, 6), (6, 3)))
    (o1, lse1), (o2, lse2) = blocks(scores, v, (2, 4))
    given = {"o1": o1, "lse1": lse1, "o2": o2, "lse2": lse2}
    before = {name: x.clone() for name, x in given.items()}
    mine.merge(*given.values())
    for name, x in given.items():
        unchanged(name, x, before[name])
