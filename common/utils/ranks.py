"""Table of each rank's tensors, side by side: for examples small enough to print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    return table_of_results(
        title, [dict(zip(tensors, row, strict=True)) for row in zip(*columns, strict=True)]
    )


def table_of_results(title: str, results: Sequence[Mapping[str, Tensor]]) -> Table:
    """Return the same table of the mappings that ranks return from `spawn`."""
    rows = [[str(rank), *map(_text, tensors.values())] for rank, tensors in enumerate(results)]
    return make_table(title, ("rank", *results[0]), rows, show_lines=True)


def _of_all(x: Tensor, group: Group) -> list[Tensor]:
    with ledger.uncounted():
        shape = torch.tensor([0, 0, *x.shape][-2:], dtype=torch.float64)
        shapes = comm.all_gather(shape, group).view(-1, 2).int().tolist()
        longest = max(max(r, 1) * c for r, c in shapes)
        padded = torch.cat([x.flatten(), x.new_zeros(longest - x.numel())])
        numbers = comm.all_gather(padded, group).view(group.size, longest)
    return [row[: max(r, 1) * c].view(max(r, 1), c) for row, (r, c) in zip(numbers, shapes, strict=True)]


def _text(x: Tensor) -> str:
    return "\n".join(" ".join(f"{value + 0.0:.4g}" for value in row) for row in torch.atleast_2d(x).tolist())
