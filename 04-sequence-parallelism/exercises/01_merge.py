"""Merge of two softmax blocks.

S queries attend to keys that come in blocks. Attention to one block returns, for each query,

    o_SK = sum_j exp(score_j) v_j / sum_j exp(score_j)        lse_S = log sum_j exp(score_j)        j: keys of the block

so exp(lse) is the denominator of the block and exp(lse) o its numerator. Numerators and denominators of two blocks add
up. Merge (o, lse) of two blocks into (o, lse) of all their keys:

    block 1    scores 0, 0            v  8,  0    o  4      lse ln 2
    block 2    scores ln 2, ln 4      v 16, 24    o 21 1/3  lse ln 6
    both       2 * 4 + 6 * 21 1/3 = 136 over 2 + 6 = 8      o 17      lse ln 8

Scores may have any size: exp(1000) overflows, exp(-1000) is zero, and a row with scores near 1000 may stand beside one
with scores near -1000. A query that a mask hides from all keys of a block has o = 0 and lse = -inf there; if both
blocks are hidden, the merged row has o = 0 and lse = -inf as well, and no NaN.

Write it with torch alone; no rank takes part. The shapes have any leading dimensions, for example batch and heads.

Targets, in float64: o and lse of attention to all keys within 1e-12 of the largest element, for the example, for blocks
of any sizes merged in any order, for scores near 1000 and -1000, and for hidden rows; the four tensors unchanged.
"""

import torch
from torch import Tensor


def merge(o1_SK: Tensor, lse1_S: Tensor, o2_SK: Tensor, lse2_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o_SK, lse_S) of attention to the keys of both blocks, as new tensors."""
    raise NotImplementedError(
        "express the weight of each block by lse1 and lse2; the merged o is a weighted mean"
    )
