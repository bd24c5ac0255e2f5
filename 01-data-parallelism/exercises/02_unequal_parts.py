"""Gradients with unequal parts and unused parameters.

The loss of a step is the mean over the T targets of the whole batch, and each rank has a part of that batch:

    L = (1/T) · Σ ℓ(t)         ∇L = g₀ + g₁ + …         gᵣ = ∇ (1/T) · Σ ℓ(t)   over the targets of rank r

The parts are unequal: ranks have different numbers of samples (also none), and a target of -100 does not count; at
least one target of the whole batch counts. So a
mean over each rank's own targets is of no use; every rank needs T.

The model may have branches that the samples of a rank do not use. Their parameters have `p.grad is None` on this rank:

                     trunk   branch 0   branch 1   branch 2
    rank 0 has grad    x        x          None       None       takes part with zeros, or the messages do not match
    rank 1 has grad    x        None       x          None
    afterwards        sum      sum        sum         None       nobody used it: AdamW would decay it if it were zero

Before the call all `p.grad` are None and the weights are equal on all ranks. The model is called once, with this rank's
samples alone. `torch.nn.functional.cross_entropy(logits, y, reduction="sum")` skips targets of -100.

Communication: `comm.all_reduce(x, group)` alone. It adds x over the ranks, in place; x is a tensor that needs no
gradient, of the same shape and type on all ranks, which call it in the same order. On one rank it does nothing.

Targets: loss and gradients within 1e-12 of one device, unused stays None, weights after three steps of SGD and AdamW,
at most 2(n-1)/n of the bytes of: all gradients, one number per parameter tensor, and four numbers more.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import comm
from common.comm import Group


def backward(model: nn.Module, x_bD: Tensor, y_b: Tensor, group: Group) -> Tensor:
    """Set every p.grad to the gradient of the mean over the whole batch (None if unused); return that mean.

    x_bD: samples of this rank, b of them, each with D numbers. y_b: class of each sample, or -100.
    model(x_bD): logits_bC.
    """
    raise NotImplementedError("count this rank's targets that are not -100, and add the counts of all ranks")
