"""ZeRO-1: reduce-scatter of the flat gradients, an optimizer step on this rank's shard, all-gather of the weights."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common import comm
from common.comm import Group


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return all tensors, flattened and joined."""
    return torch.cat([x.flatten() for x in tensors])


class Zero1:
    """Optimizer of a model of which each rank keeps 1/n of the state."""

    def __init__(
        self, model: nn.Module, group: Group, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    ) -> None:
        """Copy this rank's shard of the weights into a parameter of its own, and make the optimizer for it."""
        self.parameters, self.group = list(model.parameters()), group
        whole = flat(p.detach() for p in self.parameters)
        self.sizes = comm.sizes_of(len(whole), group.size)
        self.shard = nn.Parameter(whole.split(self.sizes)[group.rank].clone())
        self.optimizer = make_optimizer([self.shard])

    @torch.no_grad()
    def step(self) -> None:
        """Sum the gradients, update this rank's shard, and give all ranks the new weights."""
        self.shard.grad = comm.reduce_scatter(flat(p.grad for p in self.parameters), self.group)
        self.optimizer.step()
        whole = comm.all_gather(self.shard.detach(), self.group, sizes=self.sizes)
        for p, new in zip(self.parameters, whole.split([p.numel() for p in self.parameters]), strict=True):
            p.copy_(new.view_as(p))
