"""Plain tensors that rank 0 holds, cut into pieces on all ranks and joined again.

distributor = TensorDistributor(mpi)
mine = distributor.distribute(x if mpi.is_master_process() else None, dim=0)
x = distributor.gather(mine, dim=0)              # on rank 0, None elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import comm
from common.errors import UsageError
from common.tensors.grid import Grid
from common.tensors.layout import Placement, Replicate, Shard
from common.tensors.make import from_pieces, from_root, tensor_of
from common.tensors.manager.mpi_manager import MPIManager

HALF = (torch.float16, torch.bfloat16)
Whole = Tensor | np.ndarray[Any, Any] | None
"""What rank 0 gives of a tensor; the others give None."""


def tensors_of_root(mpi: MPIManager, wholes: Sequence[Whole]) -> list[Tensor | None]:
    """Return as tensors what rank 0 gives, and on the other ranks tensors on "meta", of the same shapes and types.

    Raises UsageError on every rank if rank 0 gives what torch makes no tensor of.
    """
    found, problem = list[Tensor | None](), ""
    if mpi.is_master_process():
        try:
            found = [None if x is None else tensor_of(x) for x in wholes]
        except UsageError as error:
            problem = str(error)
    problem, meta = mpi.broadcast((problem, [None if x is None else x.to("meta") for x in found]))
    if problem:
        raise UsageError(problem)
    return found if mpi.is_master_process() else meta


class TensorDistributor:
    """Cuts and joins tensors on the ranks of `mpi`; `grid` holds them in one axis.

    compress: a type of 16 bits in which float32 and float64 tensors travel; they arrive in their own type, rounded.
    """

    def __init__(self, mpi: MPIManager, compress: torch.dtype | None = None) -> None:
        if compress not in (None, *HALF):
            raise UsageError(f"compress={compress}: give torch.float16, torch.bfloat16 or None")
        self.mpi, self.compress, self.grid = mpi, compress, Grid(mpi.world)
        self._grids: dict[tuple[int, int], Grid] = {}

    def calculate_split_sizes(self, total: int) -> list[int]:
        """Return the lengths of all ranks' pieces of `total`; the first ranks get one more."""
        return comm.sizes_of(total, self.mpi.get_size())

    def get_local_range(self, total: int) -> tuple[int, int]:
        """Return the begin and the end of this rank's piece of `total`."""
        sizes = self.calculate_split_sizes(total)
        begin = sum(sizes[: self.mpi.get_rank()])
        return begin, begin + sizes[self.mpi.get_rank()]

    def distribute(self, tensor: Whole, dim: int = 0) -> Tensor:
        """Return this rank's piece along `dim` of the tensor that rank 0 holds; the others give None."""
        return self._spread(tensor, self.grid, Shard(dim))

    def broadcast(self, tensor: Whole) -> Tensor:
        """Return the tensor that rank 0 holds, on every rank."""
        return self._spread(tensor, self.grid, Replicate())

    def distribute_with_broadcast(self, split: Whole, whole: Whole, dim: int = 0) -> tuple[Tensor, Tensor]:
        """Return this rank's piece of the first tensor, and all of the second."""
        return self.distribute(split, dim), self.broadcast(whole)

    def gather(self, local: Tensor, dim: int = 0) -> Tensor | None:
        """Return the pieces joined along `dim` on rank 0, None elsewhere. Lengths may differ from rank to rank."""
        return self._joined(local, self.grid, [dim])

    def allgather(self, local: Tensor, dim: int = 0) -> Tensor:
        """Return the pieces joined along `dim` on every rank."""
        kind, sent = local.dtype, self._packed(local)
        return self.mpi.allgather_tensor(sent, dim).to(kind)

    def reduce_sum(self, local: Tensor) -> Tensor | None:
        """Return the sum of all ranks' tensors on rank 0, None elsewhere."""
        return self.mpi.reduce_tensor(local)

    def distribute_2d(self, tensor: Whole, grid: tuple[int, int]) -> Tensor:
        """Return this rank's block of the matrix that rank 0 holds, on rows x columns of ranks."""
        return self._spread(tensor, self.grid_of(*grid), Shard(0), Shard(1))

    def gather_2d(self, local: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """Return the blocks joined to the matrix on rank 0, None elsewhere."""
        return self._joined(local, self.grid_of(*grid), [0, 1])

    def grid_of(self, rows: int, columns: int) -> Grid:
        """Return the ranks in rows x columns. Raises UsageError if the product is not the number of ranks."""
        if (rows, columns) not in self._grids:
            self._grids[rows, columns] = Grid(self.mpi.world, rows, columns)
        return self._grids[rows, columns]

    def _packed(self, x: Tensor) -> Tensor:
        return x.to(self.compress) if self.compress and x.dtype in (torch.float32, torch.float64) else x

    def _spread(self, tensor: Whole, grid: Grid, *placements: Placement) -> Tensor:
        [given] = tensors_of_root(self.mpi, [tensor])
        if given is None:
            raise UsageError("rank 0 must give a tensor or a NumPy array")
        mine = self._packed(given.to(self.mpi.device)) if self.mpi.is_master_process() else None
        return from_root(mine, grid, placements).local.to(given.dtype)

    def _joined(self, local: Tensor, grid: Grid, dims: Sequence[int]) -> Tensor | None:
        shapes, shape, placements = (
            self.mpi.allgather(tuple(local.shape)),
            list(local.shape),
            list[Placement](),
        )
        for axis, dim in enumerate(dims):
            along = [
                r
                for r, place in enumerate(grid.places)
                if all(p == 0 for a, p in enumerate(place) if a != axis)
            ]
            sizes = tuple(shapes[r][dim] for r in along)
            shape[dim] = sum(sizes)
            placements.append(Shard(dim, sizes))
        whole = from_pieces(self._packed(local), shape, grid, placements).on_root()
        return None if whole is None else whole.to(local.dtype)
