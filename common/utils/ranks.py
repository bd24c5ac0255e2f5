"""Table of each rank's tensors, side by side: for examples small enough to print."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group, ledger
from common.launch.terminal import make_table


def table_of_ranks(title: str, group: Group, tensors: Mapping[str, Tensor]) -> Table:
    """Return a row per rank, a column per tensor: matrices of at most two dimensions, shapes may differ.

    All ranks call it; the table is right on rank 0.
    """
    columns = [_of_all(x.detach().double().cpu(), group) for x in tensors.values()]
    rows = [[str(rank), *(_text(column[rank]) for column in columns)] for rank in range(group.size)]
    return make_table(title, ("rank", *tensors), rows, show_lines=True)


def _of_all(x: Tensor, group: Group) -> list[Tensor]:
    with ledger.uncounted():
        shape = torch.tensor([0, 0, *x.shape][-2:], dtype=torch.float64)
        shapes = comm.all_gather(shape, group).view(-1, 2).int().tolist()
        longest = max(max(r, 1) * c for r, c in shapes)
        padded = torch.cat([x.flatten(), x.new_zeros(longest - x.numel())])
        numbers = comm.all_gather(padded, group).view(group.size, longest)
    return [row[: max(r, 1) * c].view(max(r, 1), c) for row, (r, c) in zip(numbers, shapes, strict=True)]


def _text(x: Tensor) -> str:
    return "\n".join(" ".join(f"{value + 0.0:.4g}" for value in row) for row in x.tolist())
