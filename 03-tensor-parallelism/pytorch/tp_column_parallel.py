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

So the forward pass needs no message, and the backward pass needs one: `copy`, the identity whose adjoint is
an all-reduce (Megatron-LM's f; Shoeybi et al., 2019, arXiv:1909.08053, section 3). Without it the loss is
right, but the gradients of all earlier layers are wrong. torch's nn.Linear stores A^T, [out, in]: the columns
of A are its rows.

Cost of one layer, x of |x| bytes: per rank 2(n-1)/n |x| in the backward pass; (n-1)/n |y| more in the forward
pass where the result is gathered. Memory: A, its gradient, its optimizer states and y take 1/n; x takes all.

    python tp_column_parallel.py --nproc 4     torchrun --nproc_per_node=4 tp_column_parallel.py
    mpirun -np 4 python tp_column_parallel.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from common.comm import Group, collectives, sizes_of
from common.comm.placement import shard
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.models.transformer import MatrixProduct, Transformer, replace_linears
from common.utils.ranks import table_of_ranks

from tp_costs import column_bytes
from tp_training import TensorOptions, lesson, tp_group

VERSIONS = ("gathered",)


class ColumnParallelLinear(MatrixProduct):
    """Linear layer split by columns: maps x_BSD to y_BSf, this rank's share f of the output features.

    linear: the whole layer, the same on all ranks. This rank keeps its rows of the weight and of the bias;
    their number differs by at most one between ranks. gather_output: return y_BSF, all features on all ranks.
    enter: the function applied to x first, by default `copy`; give the identity when a region of several
    layers has already applied it for all of them.
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

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSf = self.product(self.enter(x_BSD), self.weight, self.bias)
        if not self.gather_output:
            return y_BSf
        return collectives.gather(y_BSf, self.group, -1, sizes=self.sizes)


def toy(rt: Runtime, group: Group) -> bool:
    """Run the example of the docstring with 2 columns per rank; True if y and dx equal those of one rank."""
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
    """Split every input projection (queries, keys, values, up, gate) by columns, and gather each result.

    This is correct and simple; tp_megatron.py avoids the gathering.
    """
    make = partial(ColumnParallelLinear, group=group, gather_output=True)
    replace_linears(model.layers, ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"), make)
    return model


def train(job: Job[TensorOptions]) -> Iterator[Tensor]:
    """Train with every input projection split by columns; yield the loss of each batch."""
    model, group = job.model, job.group
    column_parallel(model, group)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # the same on all ranks
        count = batch.count_targets()
        losses = []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = model.loss(model(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        yield total(losses)


LESSON = Lesson("tp", {"gathered": train}, column_bytes)


def main(rt: Runtime, o: TensorOptions) -> bool:
    """Check the example of the docstring, then prove a Transformer; with --benchmark only time it."""
    group = tp_group(rt)
    return lesson(rt, o, LESSON, lambda: toy(rt, group))


if __name__ == "__main__":
    run(main, TensorOptions, versions=VERSIONS)
