"""Buckets: gradients that travel during the backward pass.

An all-reduce per parameter tensor costs a latency each, and if all of them follow the backward pass, the wire idles
first. Collect gradients in flat buckets instead, and start the all-reduce of a bucket as soon as all of its gradients
are complete:

    parameters   p0   p1   p2   p3   p4   p5          the backward pass completes the gradients of p5 first
    buckets      [  2   ] [    1    ] [  0  ]         cut from the last parameter on, with a limit in elements

    backward  layer 5 | layer 4 | layer 3 | layer 2 | layer 1 | layer 0
    messages                    [ bucket 0 ]        [ bucket 1 ]      [ bucket 2 ]

The rule of the cut: go through `model.parameters()` from the last to the first; put each parameter into the current
bucket, but begin another bucket first if the current one has parameters and would exceed the limit with this one.

Ranks match all-reduces by their order, not by content. The gradients may become complete in different orders on
different ranks, so a bucket that is complete waits until all buckets before it have been started.

The use in a step with two micro-batches; a backward pass before `begin` only accumulates in p.grad:

    loss(model(x0)).backward()
    buckets.begin()                      # the next backward pass is the last one of the step
    loss(model(x1)).backward()           # buckets leave while it runs
    buckets.finish()                     # now every p.grad is the sum over micro-batches and ranks

Losses are divided by the targets of all ranks already, so gradients are summed. Weights are equal on all ranks, and
every rank uses every parameter in each backward pass. All parameters have one type. After a step the gradients become
None, or zero.

`p.register_post_accumulate_grad_hook(f)` calls f(p) in each backward pass, after its gradient was added to p.grad.
`pending = comm.all_reduce(x, group, async_op=True)` starts to add x over the ranks in place and returns at once;
`pending.wait()` returns when x holds the sum. Call it in `finish`: in a hook it would stop the backward pass.

Targets: gradients within 1e-12 of one device, weights after three steps of SGD and AdamW, one all-reduce per bucket,
each started before the backward pass of the next bucket's layers ends.
"""

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group


class Buckets:
    """Sum of a model's gradients over the ranks, in buckets of at most `limit` elements."""

    def __init__(self, model: nn.Module, group: Group, limit: int) -> None:
        """Cut the buckets, and register a hook on every parameter."""
        raise NotImplementedError(
            "cut list(model.parameters())[::-1] into lists of parameters by the rule of the text"
        )

    def begin(self) -> None:
        """Let the next backward pass send; the passes before it only accumulate."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for all buckets; afterwards every p.grad is the sum over the ranks."""
        raise NotImplementedError
