"""Row parallelism: each rank holds some rows of the matrix and computes a partial sum of every result.

    y = x A + b,   A = [A0; A1; ...]  by rows,   x = [x0 | x1 | ...]      so      y = x0 A0 + x1 A1 + ... + b

                 rank 0                     rank 1
    x            1                          2                      S: the columns that meet the rank's rows
                 3                          4
    A, by rows   1 0                        2 1
    x A          1 0                        4 2                    P: all-reduced, then b is added, once
                 3 0                        8 4
    y            5 2                        5 2                    R
                 11 4                       11 4
    dx           dy A0^T                    dy A1^T                S: complete, and nothing is sent
    dA           x0^T dy                    x1^T dy                S: complete

This is column parallelism's mirror image: the forward pass needs one message, the backward pass none.
`reduce`, the all-reduce whose adjoint is the identity, is Megatron-LM's g (arXiv:1909.08053, section 3). A
row-parallel layer takes a split input, and a column-parallel layer returns one: columns, then rows, is a
whole MLP with one all-reduce per pass,

    x  R --copy--> x A0, x A1  S --gelu--> S --x B0, x B1--> P --reduce--> R

because gelu works on one number at a time, and each rank has complete numbers. In the other order each rank
has partial sums, and gelu(p0 + p1) is not gelu(p0) + gelu(p1): rows, then columns, needs an all-reduce before
the gelu and an all-gather after the columns. `gelu_of_parts` shows both orders.

Cost of a layer, y of |y| bytes: per rank 2(n-1)/n |y| in the forward pass; (n-1)/n |x| more in the backward
pass where x is not split already. Memory: A, its gradient and states and x take 1/n; y takes all.

    python tp_row_parallel.py --nproc 4     torchrun --nproc_per_node=4 tp_row_parallel.py
    mpirun -np 4 python tp_row_parallel.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, collectives, padded
from common.comm.ledger import Ledger, show_bytes
from common.comm.placement import shard
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.equality import TOLERANCE, difference
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.models.transformer import MatrixProduct, Transformer, replace_linears
from common.utils.ranks import table_of_ranks

from tp_column_parallel import ColumnParallelLinear
from tp_costs import row_bytes
from tp_training import TensorOptions, lesson, show, tp_group

VERSIONS = ("scattered", "column-row")


class RowParallelLinear(MatrixProduct):
    """Linear layer split by rows: maps x_BSf, the features of this rank, to y_BSD, whole on all ranks.

    linear: the whole layer, the same on all ranks. This rank keeps its columns of the weight, and the whole
    bias, which is added once, after the sum. input_is_parallel: False where x_BSF is whole on all ranks and
    must be cut first. leave: the function applied to the partial result, by default the sum over ranks.
    """

    def __init__(
        self,
        linear: nn.Linear,
        group: Group,
        input_is_parallel: bool = True,
        leave: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.group, self.input_is_parallel = group, input_is_parallel
        self.weight = shard(linear.weight, group, 1)
        self.bias = linear.bias
        self.leave = leave or (lambda y: collectives.reduce(y, group))

    def forward(self, x_BSf: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x_BSf = collectives.scatter(x_BSf, self.group, -1)
        y_BSD = self.leave(self.product(x_BSf, self.weight))
        return y_BSD if self.bias is None else y_BSD + self.bias


def toy(rt: Runtime, group: Group) -> bool:
    """Run the docstring's example, a column of x and a row of A per rank; True if it equals one rank's."""
    n = group.size
    whole_x = torch.arange(1.0, 2 * n + 1).view(2, n)
    whole = nn.Linear(n, 2)
    with torch.no_grad():
        whole.weight.copy_(torch.arange(2.0 * n).view(2, n) % 3)
        whole.bias.copy_(torch.tensor([0.5, 0.25]))
    x = whole_x[:, group.rank : group.rank + 1].clone().requires_grad_()
    layer = RowParallelLinear(whole, group)
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    shown = {"x, its column": x, "A, its row": layer.weight.T, "x A": x @ layer.weight.T}
    shown |= {"y, with b = 0.5 0.25": y, "dx for dy = 1": x.grad}
    console(rt).print(table_of_ranks("row parallel: the parts are summed, then b is added", group, shown))
    return torch.equal(y, whole(whole_x)) and torch.equal(x.grad, layer.weight.sum(0).expand(2, 1))


def gelu_of_parts(rt: Runtime, group: Group) -> bool:
    """Show difference to one device and bytes sent forward for each order of the splits around a GELU.

    True if only the order that sums after the GELU is wrong, and all bytes are those of the formulas.
    """
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, n = draw(3, 8), group.size
    first, second = (nn.Linear(8, 8, bias=False) for _ in range(2))
    first.weight, second.weight = nn.Parameter(draw(8, 8)), nn.Parameter(draw(8, 8))
    right = second(F.gelu(first(x)))
    columns, rows = ColumnParallelLinear(first, group), RowParallelLinear(second, group)
    part = RowParallelLinear(first, group, False, leave=lambda y: y)  # a rank's term of the sum
    after = ColumnParallelLinear(second, group, gather_output=True)
    orders: dict[str, Callable[[], Tensor]] = {
        "columns, gelu, rows": lambda: rows(F.gelu(columns(x))),
        "rows, sum, gelu, columns": lambda: after(F.gelu(collectives.reduce(part(x), group))),
        "rows, gelu, sum, columns": lambda: after(collectives.reduce(F.gelu(part(x)), group)),  # too late
    }
    sum_bytes = Fraction(2 * (n - 1) * 3 * 8 * 8, n)
    both = sum_bytes + Fraction((n - 1) * 3 * padded(8, n) * 8, n)
    shown, found = [], []
    for name, call in orders.items():
        with Ledger() as ledger:
            apart = difference(right, call())
        shown.append((name, show_bytes(ledger.bytes()), f"{apart:.1e}"))
        found.append((apart > TOLERANCE[right.dtype], ledger.bytes()))
    columns_shown = ("order", "bytes sent forward", "largest difference to one device")
    show(rt, "a GELU between two split layers", columns_shown, shown)
    return found == [(False, sum_bytes), (False, both), (n > 1, both)]


def row_parallel(model: Transformer, group: Group, version: str) -> Transformer:
    """Split by version: `scattered` o_proj and down_proj, their inputs cut first; `column-row` the MLPs."""
    if version == "scattered":
        make = partial(RowParallelLinear, group=group, input_is_parallel=False)
        replace_linears(model.layers, ("o_proj", "down_proj"), make)
    else:
        replace_linears(model.layers, ("up_proj", "gate_proj"), partial(ColumnParallelLinear, group=group))
        replace_linears(model.layers, ("down_proj",), partial(RowParallelLinear, group=group))
    return model


def train(job: Job[TensorOptions]) -> Iterator[Tensor]:
    """Train with projections split by rows; yield the loss of each batch."""
    model, group = job.model, job.group
    row_parallel(model, group, job.version)
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


LESSON = Lesson("tp", dict.fromkeys(VERSIONS, train), row_bytes)


def main(rt: Runtime, o: TensorOptions) -> bool:
    """Check the two examples, then prove a Transformer; with --benchmark only time it."""
    group = tp_group(rt)
    return lesson(rt, o, LESSON, lambda: toy(rt, group) and gelu_of_parts(rt, group))


if __name__ == "__main__":
    run(main, TensorOptions, versions=VERSIONS)
