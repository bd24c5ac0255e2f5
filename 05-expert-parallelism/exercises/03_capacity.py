"""Capacity: the same choices are dropped on any number of ranks.

An expert takes at most C = ceil(c K S / E) choices of a sequence, c being the capacity factor, in the order of the
tokens' positions, and for one token the first choice before the second. Each expert has C slots per sequence, full or
empty, so all shapes are fixed before routing. Later choices are dropped: they add nothing to y, and the weights of the
others stay as they are. One sequence, S = 4, K = 1, E = 2, c = 1, so C = 2:

    token   expert   slot                    rows of the sequence, E C D
    t0      1        0                       expert 0: t2 (empty)
    t1      1        1                       expert 1: t0 t1
    t2      0        0
    t3      1        -1, dropped             y of t3 is 0

The samples of a batch are split over ranks, and each rank calls these functions with its own B sequences. A queue per
sequence makes the result independent of the split, without communication. With expert parallelism an all-to-all then
sends rows_EBCD to the ranks of the experts; its sizes are known without asking other ranks.

Targets: slots of one sequence; the same slots on 1, 2 and 4 ranks; later tokens change nothing; rows and y, with
the gradients of x, weights and experts, those of a loop over tokens. docs/05-expert-parallelism.md, "Routers and the
load of the experts".

B sequences of this rank  S tokens of a sequence  K experts per token  E experts  C slots  D width
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def capacity(S: int, K: int, E: int, c: float) -> int:
    """Return the slots C of an expert for a sequence."""
    raise NotImplementedError("the share of an expert under even load, times c, rounded up")


def slots(experts_BSK: Tensor, E: int, C: int) -> Tensor:
    """Return slot_BSK, int64: the slot of each choice at its expert, 0 to C - 1, or -1 if it is dropped."""
    raise NotImplementedError(
        "the slot of a choice is the number of earlier choices of the same expert in the same sequence: "
        "count them by a running sum (cumsum) of F.one_hot"
    )


def dispatch(x_BSD: Tensor, experts_BSK: Tensor, slot_BSK: Tensor, E: int, C: int) -> Tensor:
    """Return rows_EBCD: the token in each slot of each expert and sequence, zeros in empty slots. Differentiable."""
    raise NotImplementedError(
        "find b, s and k of the choices that are kept: (slot_BSK >= 0).nonzero(as_tuple=True)"
    )


def combine(y_EBCD: Tensor, experts_BSK: Tensor, slot_BSK: Tensor, weights_BSK: Tensor) -> Tensor:
    """Return y_BSD: the weighted sum over a token's choices that were kept, 0 if there is none. Differentiable."""
    raise NotImplementedError("pick the results of the choices that are kept, as dispatch placed them")
