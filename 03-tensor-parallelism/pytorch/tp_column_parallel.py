"""Column parallelism: each rank holds some columns of the matrix and computes some columns of the result.

    y = x A + b,   A = [A0 | A1 | ...]      so      y = [x A0 + b0 | x A1 + b1 | ...]

                 rank 0                     rank 1
    x            1 2                        1 2                    R: the same on all ranks
                 3 4                        3 4
    A, by        1 0                        0 1                    S: its own columns
    columns      2 1                        1 3
    y            5 2                        2 7                    S: complete, and nothing was sent
                 11 4                       4 15

    dx           dy0 A0^T          +        dy1 A1^T               P: all-reduced, which is the adjoint of using the
    dA           x^T dy0                    x^T dy1                S: complete       same x on n ranks

So the forward pass needs no message, and the backward pass needs one: `copy`, the identity whose adjoint is an
all-reduce (Megatron-LM's f; Shoeybi et al., 2019, arXiv:1909.08053, section 3). Without it the loss is right and every
gradient behind it is wrong. torch's nn.Linear keeps A^T, [out, in]: the columns of A are its rows.

Cost of one layer, x of |x| bytes: 2(n-1)/n |x| a rank in the backward pass; (n-1)/n |y| more in the forward pass where
the result is gathered. Memory: A, its gradient, its optimizer states and y take 1/n; x takes all.

    python tp_column_parallel.py --nproc 4     torchrun --nproc_per_node=4 tp_column_parallel.py
    mpirun -np 4 python tp_column_parallel.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tp_training import TensorOptions, lesson, tp_group

from common import collectives
from common.comm import Group, padded, sizes_of
from common.lesson import console, run
from common.models.transformer import Transformer
from common.placement import shard
from common.runtime import Runtime
from common.training import Version
from common.utils.ranks import table_of_ranks

VERSIONS = ("gathered",)


class ColumnParallelLinear(nn.Module):
    """x_BSD to y_BSf: the features f of this rank, of as many as the plain `linear` has.

    linear: the whole layer, the same on all ranks; this one keeps its rows of the weight and of the bias, which differ
    by one at the most in number. gather_output: return y_BSF, all features on all ranks. enter: what x passes first;
    give the identity when a region of several layers has already made x ready for all of them.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: Group,
        gather_output: bool = False,
        enter: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.group, self.gather_output = group, gather_output
        self.sizes = sizes_of(linear.out_features, group.size)
        self.weight = shard(linear.weight, group, 0)
        self.bias = None if linear.bias is None else shard(linear.bias, group, 0)
        self.enter = enter or (lambda x: collectives.copy(x, group))
        self.product: Callable[..., Tensor] = F.linear

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSf = self.product(self.enter(x_BSD), self.weight, self.bias)
        if not self.gather_output:
            return y_BSf
        return collectives.gather(y_BSf, self.group, -1, sizes=self.sizes)


def toy(rt: Runtime, group: Group) -> bool:
    """The picture of the docstring with 2 columns a rank, forward and backward, against the product on one rank."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    whole = nn.Linear(2, 2 * group.size, bias=False)
    with torch.no_grad():
        whole.weight.copy_(torch.arange(4.0 * group.size).view(-1, 2) % 5)
    layer = ColumnParallelLinear(whole, group)
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    shown = {"x": x, "A, its columns": layer.weight.T, "y = x A": y, "dx for dy = 1": x.grad}
    shown["dA"] = layer.weight.grad.T
    console(rt).print(table_of_ranks("column parallel: y is split, dx is summed", group, shown))
    expected = whole(x.detach())
    mine = expected.split(2, dim=1)[group.rank]
    return torch.equal(y, mine) and torch.equal(x.grad, whole.weight.sum(0).expand(2, 2))


def column_parallel(model: Transformer, group: Group) -> Transformer:
    """Every projection into a layer (queries, keys, values, up, gate) split by columns, each result gathered.

    Correct, and as simple as it gets; tp_megatron.py leaves out the gathering.
    """
    for module in list(model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in (
                "q_proj",
                "k_proj",
                "v_proj",
                "up_proj",
                "gate_proj",
            ):
                setattr(module, name, ColumnParallelLinear(child, group, gather_output=True))
    return model


@dataclass
class ColumnOptions(TensorOptions):
    """Model and batch of this lesson."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


def make_version(name: str, model: nn.Module, rt: Runtime, o: ColumnOptions) -> Version:
    """The model with its layers split along all ranks."""
    assert isinstance(model, Transformer)
    return Version(column_parallel(model, tp_group(rt)))


def step_bytes(name: str, model: nn.Module, group: Group, o: ColumnOptions) -> Fraction:
    """Bytes a rank sends in a step: the results gathered, the gradients of the inputs all-reduced."""
    assert isinstance(model, Transformer)
    c, size = model.config, next(model.parameters()).element_size()
    columns = [c.heads * c.head_width, *[c.kv_heads * c.head_width] * 2, c.mlp_width]
    columns += [c.mlp_width] if c.mlp == "swiglu" else []
    gathered = sum(padded(number, group.size) for number in columns)
    numbers = c.layers * (gathered + 2 * len(columns) * c.width)
    return Fraction((group.size - 1) * o.batch * o.sequence * numbers * size, group.size)


def main(rt: Runtime, o: ColumnOptions) -> bool:
    """What comes first, then a Transformer; with --benchmark its time alone."""
    group = tp_group(rt)
    return lesson(rt, o, VERSIONS, make_version, step_bytes, lambda: toy(rt, group))


if __name__ == "__main__":
    run(main, ColumnOptions)
