"""ZeRO-1: each rank keeps the optimizer state of its shard.

AdamW keeps two numbers per parameter. Under data parallelism all ranks keep them for all Ψ parameters: 8Ψ bytes in
float32. But an optimizer works element by element. So rank r can update the r-th part of all weights alone, and keep
the state of that part only, 8Ψ/n bytes. An all-reduce of the gradients is a reduce-scatter and an all-gather. The
optimizer steps between the two, and the all-gather carries weights:

    flat      [ weight 0 | bias 0 |    weight 1    | bias 1 ]      all parameters, flattened and joined
              [   rank 0    |    rank 1    |    rank 2      ]      shards: a cut may lie inside of a matrix

    p.grad on all ranks -> reduce-scatter -> the sum, of this rank's shard
                           optimizer      -> new weights of this rank's shard
                           all-gather     -> new weights on all ranks, copied into the model's parameters

The use:

    zero = Zero1(model, group, lambda shards: torch.optim.AdamW(shards))
    for every step:
        model.zero_grad()
        loss(model(x)).backward()        # p.grad: the gradient of this rank's part of the batch
        zero.step()                      # afterwards all ranks have the weights of one device

Losses are divided by the targets of all ranks already, so gradients are summed. Weights are equal on all ranks at the
start, and every parameter has a gradient. Call `make_optimizer` once, with a list of nn.Parameter; the optimizer's own
`step()` reads their `.grad`. Write into the model's parameters under `torch.no_grad()`.

Communication (both do nothing on one rank; tensors need no gradient):

    comm.reduce_scatter(x_N, group)              the sum over the ranks of this rank's part of x_N; the parts are those
                                                 of x_N.tensor_split(n): they differ by at most one element
    comm.all_gather(x_p, group, sizes=sizes)     the parts of all ranks joined; sizes: their lengths, such as
                                                 comm.sizes_of(N, n)

`group.rank` and `group.size` are this rank's place r and the number n of ranks.

Targets: weights within 1e-12 of one device after steps of SGD and AdamW, state of at most 2(Ψ/n + number of parameter
tensors) numbers, bytes sent at most 2(n-1)/n of those of the gradients (and of n numbers per parameter tensor).
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from common import comm
from common.comm import Group


class Zero1:
    """Optimizer of a model of which each rank keeps 1/n of the state."""

    def __init__(
        self, model: nn.Module, group: Group, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        """Copy this rank's shard of the weights into a parameter of its own, and make the optimizer for it."""
        raise NotImplementedError(
            "join all parameters into one flat tensor, and take part r of tensor_split(n)"
        )

    def step(self) -> None:
        """Sum the gradients, update this rank's shard, and give all ranks the new weights."""
        raise NotImplementedError
