"""Cross-entropy of logits that are split along the vocabulary.

Every rank has the logits z of all N tokens for its part of the vocabulary, z_Nv. The loss of a token with target t is

    -log softmax(z)[t]  =  log(sum over all V of exp(z_v - m)) - (z_t - m),      m = max over all V of z_v

and its gradient is softmax(z), minus 1 at t. Gathering the logits would send V numbers per token; three are enough: the
maximum, the sum of the exponentials, and the logit of the target, which only one rank has. Without m, exp overflows.

            rank 0: tokens 0 1 2    rank 1: tokens 3 4        t = 3
    z       5  1  0                 6  2                      m = 6
    z - m   -1 -5 -6                0 -4                      sum = e^-1 + e^-5 + e^-6 + e^0 + e^-4,  z_t - m = 0

`comm.all_reduce(x, group, op)` replaces the contents of x on every rank by the "sum" (default) or the "max" over the
ranks of the group; it works in place, and autograd does not see it. So write the backward pass yourself, in a class
derived from torch.autograd.Function. Its incoming gradient dloss_N is the same on all ranks.

Targets: the loss of each token and the gradient of this rank's logits, also for logits of a thousand; an all-reduce
sends 3 N numbers at most forward and nothing backward; the memory at the peak of both passes, beyond the logits
themselves, is at most 4 N v numbers, so no rank ever holds N V.
"""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def cross_entropy(logits_Nv: Tensor, targets_N: Tensor, begin: int, group: Group) -> Tensor:
    """Return loss_N, the cross-entropy of each token in nats, the same on all ranks.

    logits_Nv: column j belongs to token begin + j of the vocabulary; v may differ from rank to rank. targets_N: each
    token's target in the whole vocabulary, the same on all ranks.
    """
    raise NotImplementedError("find m_N: the maximum of this rank's columns, then over the ranks")
