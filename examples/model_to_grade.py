"""A model file that the grader compares with one device: an MLP on a mesh of dp x tp.

    python -m common.grade --mine examples/model_to_grade.py --mesh "tp=2 dp=2"

Copy it and put your own model, batches and strategy in place of these; common/grade/mine.py describes the functions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm.mesh import Mesh
from common.comm.placement import sum_gradients

from tp_column_parallel import ColumnParallelLinear
from tp_row_parallel import RowParallelLinear


def make_model() -> nn.Sequential:
    """Return the plain model, with the same weights at each call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets) of the whole global batch, the same on every rank."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=draw).double(), torch.randn(5, 3, generator=draw).double()


def parallelize(model: nn.Sequential, mesh: Mesh) -> None:
    """Split the matrices over tp; the layers declare which of their parameters are split."""
    up, down = model[0], model[2]
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    model[0] = ColumnParallelLinear(up, mesh.group("tp"))
    model[2] = RowParallelLinear(down, mesh.group("tp"))


def step(model: nn.Module, batch: tuple[Tensor, Tensor], mesh: Mesh) -> Tensor:
    """Run this rank's samples forward and backward; leave the summed gradients, return the loss of all samples."""
    dp = mesh.group("dp")
    x, y = (t.tensor_split(dp.size)[dp.rank] for t in batch)
    loss = F.mse_loss(model(x), y, reduction="sum") / batch[1].numel()
    loss.backward()
    sum_gradients(model.parameters(), mesh)
    total = loss.detach().clone()
    comm.all_reduce(total, dp)
    return total
