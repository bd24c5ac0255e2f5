"""ZeRO-3: each rank keeps a shard of the weights, and gathers a layer when it runs.

The parameters of a layer, flattened, joined and padded with zeros to a multiple of n, are cut into n shards of equal
length. A rank keeps its shard of every layer, with its gradient and its optimizer state, and nothing else:

    layer i    [ weight    | bias | 0 ]        for every layer and micro-batch
               [rank 0|rank 1 |rank 2 ]        forward    shards of the weights -> all-gather -> y = layer(x); free them
                                               backward   shards of the weights -> all-gather -> gradients of x and of
                                                          the weights; those -> reduce-scatter -> sum, of my shard

After the forward pass of a layer its whole weights must be free again, and autograd must not keep them either. A
simple way: a `torch.autograd.Function` that runs a layer and saves x and the shard alone. Its backward pass gathers the
weights again, runs the layer once more under `torch.enable_grad()`, and takes the gradients by `torch.autograd.grad`.
(A Function gives gradients to its inputs only, so the shard must be one of them. Autograd is off inside of both its
functions.)

`torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,))` runs a layer with these tensors in place of its
parameters, whatever their shapes are. `p.data = torch.empty(0, dtype=p.dtype)` frees the memory of a parameter.

The use, with M micro-batches per step:

    model = Zero3(layers, group)
    optimizer = torch.optim.AdamW(model.shards)
    for x in micro_batches:
        loss(model.forward(x)).backward()      # adds to the .grad of the shards
    optimizer.step()

Layers run one after the other; each maps a tensor to a tensor and has several parameters, all of one type. Weights are
equal on all ranks at the start. Losses are divided by the targets of all ranks already, so gradients are summed. x may
require a gradient or not.

Communication; the flat tensors need no gradient and have no gaps in memory (see `contiguous()`), nothing is returned:

    comm.all_gather_into(out_N, x_s, group)        out: the shards x of all ranks, joined; N = n · s
    comm.reduce_scatter_into(out_s, x_N, group)    out: this rank's shard of the sum of x over the ranks

`group.rank` and `group.size` are this rank's place r and the number n of ranks.

Targets: outputs, gradients and weights within 1e-12 of one device; after `Zero3(...)` a rank holds its shards alone; in
the forward pass the bytes of two layers at most (and activations), in the backward pass of five (weights, gradients and
messages together) beside the gradients of its shards; 3(n-1)/n of the bytes of the weights per micro-batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from common import comm
from common.comm import Group


class Zero3:
    """Layers of which each rank keeps 1/n of the weights.

    shards: list of one flat nn.Parameter per layer, part r of [parameters in the order of layer.parameters() | zeros].
    """

    def __init__(self, layers: Sequence[nn.Module], group: Group) -> None:
        """Cut every layer; keep this rank's shards, and free the parameters of the layers."""
        raise NotImplementedError(
            "flatten, join and pad the parameters of a layer; a shard is a copy of chunk r of n"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers on x; gather the weights of one at a time, and free them after their use."""
        raise NotImplementedError
