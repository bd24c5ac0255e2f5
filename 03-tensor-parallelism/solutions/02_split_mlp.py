"""Columns, gelu, rows: copy before, reduce after, and the bias once."""

import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives


class SplitMLP(nn.Module):
    """This rank's shards of an MLP, as nn.Parameters."""

    def __init__(self, up: nn.Linear, down: nn.Linear, group: Group) -> None:
        """Copy this rank's shards of two whole layers."""
        super().__init__()
        self.group, self.sizes = group, comm.sizes_of(up.out_features, group.size)

        def mine(weight: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(weight.detach().split(self.sizes, dim)[group.rank].clone())

        self.up_weight_fD, self.up_bias_f = mine(up.weight, 0), mine(up.bias, 0)
        self.down_weight_Df = mine(down.weight, 1)
        self.down_bias_D = nn.Parameter(down.bias.detach().clone())

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return y_BSD, the same on all ranks, of x_BSD, the same on all ranks."""
        x_BSD = collectives.copy(x_BSD, self.group)
        hidden_BSf = F.gelu(F.linear(x_BSD, self.up_weight_fD, self.up_bias_f))
        return collectives.reduce(F.linear(hidden_BSf, self.down_weight_Df), self.group) + self.down_bias_D
