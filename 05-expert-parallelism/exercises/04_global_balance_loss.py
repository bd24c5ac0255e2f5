"""Global balance loss: the product of global means, not the mean of products.

Switch's loss (arXiv:2101.03961) keeps the experts busy alike:

    loss = E sum over e of f_e P_e     f_e  share of all choices that fell on expert e
                                       P_e  mean of the router's scores for e; both over all tokens of the global batch

The tokens are split over ranks, and on each rank over micro-batches. Products of local means are another loss:

    tokens          scores of each   f_0  f_1   P_0  P_1    E sum f_e P_e
    of rank 0       3/4 1/4          1    0     3/4  1/4    1.5
    of rank 1       1/4 3/4          0    1     1/4  3/4    1.5, and the mean is 1.5
    of both                          1/2  1/2   1/2  1/2    1: the load is even

f counts choices and has no gradient; P has one. So the counts must be summed over micro-batches and ranks, and every
rank then returns its part of the loss: the parts of all ranks add up to the loss, and the gradient of a rank's part
with respect to its own scores is the gradient of the whole loss. A trainer adds the part to this rank's part of the
cross-entropy and calls backward.

Use `comm.all_reduce(x, group)` alone, once: it replaces the tensor x by its sum over the ranks of the group, in place,
and autograd does not see it. Counts are integers (torch.bincount with minlength=E); convert them to the scores' type
before you divide. Ranks may have different numbers of tokens, a micro-batch may have none; no
rank has an empty list.

Targets: the example; the loss and the gradient of the scores, equal to one device within 1e-12, on 1 to 4 ranks; one
all-reduce of E integers, 2(n-1)/n * 8 E bytes. docs/05-expert-parallelism.md, "The load of the whole batch".

T tokens of a micro-batch  E experts  K choices per token
"""

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def balance_loss(parts: list[tuple[Tensor, Tensor]], group: Group) -> Tensor:
    """Return this rank's part of the loss, a scalar.

    parts: (scores_TE, experts_TK) of each micro-batch of this rank. Scores sum to 1 per token.
    """
    raise NotImplementedError(
        "count the choices of all micro-batches per expert, sum the counts over the ranks; "
        "then write the loss as a sum over this rank's tokens"
    )
