"""ZeRO-3: a Function per layer that gathers weights when it runs, forward and backward, and saves x and the shard."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from common import comm
from common.comm import Group


class Layer:
    """A layer without weights: it knows their names and shapes."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        """Cut the parameters of the module, and free them."""
        self.module, self.group = module, group
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        whole = self.flat([p.detach() for p in module.parameters()])
        self.shard = nn.Parameter(whole.chunk(group.size)[group.rank].clone())
        for p in module.parameters():
            p.data = torch.empty(0, dtype=p.dtype)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors flattened, joined and padded with zeros to a multiple of n."""
        joined = torch.cat([x.flatten() for x in tensors])
        return F.pad(joined, (0, -len(joined) % self.group.size))

    def weights(self, shard: Tensor) -> dict[str, Tensor]:
        """Return the whole weights by name, gathered from the shards of all ranks."""
        whole = shard.new_empty(self.group.size * len(shard))
        comm.all_gather_into(whole, shard.detach(), self.group)
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = whole[: sum(sizes)].split(sizes)
        return {name: w.view(shape) for (name, shape), w in zip(self.shapes.items(), parts, strict=True)}


class Gathered(torch.autograd.Function):
    """y = layer(x) with gathered weights, which the backward pass gathers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, layer: Layer) -> Tensor:
        """Return y; autograd is off in here, so nothing else is kept."""
        ctx.layer = layer
        ctx.save_for_backward(x, shard)
        return functional_call(layer.module, layer.weights(shard), (x,))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and of the shard, the latter summed over the ranks."""
        (x, shard), layer = ctx.saved_tensors, ctx.layer
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            weights = {name: w.requires_grad_() for name, w in layer.weights(shard).items()}
            y = functional_call(layer.module, weights, (x,))
        dx, *dw = torch.autograd.grad(y, [x, *weights.values()], dy)
        gradient = torch.empty_like(shard)
        comm.reduce_scatter_into(gradient, layer.flat(dw), layer.group)
        return dx, gradient, None


class Zero3:
    """Layers of which each rank keeps 1/n of the weights."""

    def __init__(self, layers: Sequence[nn.Module], group: Group) -> None:
        """Cut every layer; keep this rank's shards, and free the parameters of the layers."""
        self.layers = [Layer(module, group) for module in layers]
        self.shards = [layer.shard for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers on x; gather the weights of one at a time, and free them after their use."""
        for layer in self.layers:
            x = Gathered.apply(x, layer.shard, layer)
        return x
