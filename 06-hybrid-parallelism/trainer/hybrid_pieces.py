"""Boxes of whole tensors that each rank holds: a checkpoint is a set of boxes, independent of any mesh.

    q_proj.weight [8, 6], tp = 2 by rows, then ZeRO over dp = 3: rank (tp 1, dp 1) has numbers 8..16 of rows 4..8

        row 4   0  1  2  3  4  5        Shard(0) along tp: rows 4..8, an origin to add
        row 5   6  7 [8  9 10 11]       FlatShard along dp: one run of the flattened rows, which is not a box,
        row 6 [12 13 14 15]16 17        but two of them: 1 x 4 at (5, 2) and 1 x 4 at (6, 0)
        row 7  18 19 20 21 22 23

A run of a tensor of d dimensions fills 2 d - 1 boxes at the most: a part of its first row, whole rows, a part
of its last row; the first and the last row divide again in the same way. Any other mesh cuts the same tensor
into other boxes. torch.distributed.checkpoint intersects the two sets of boxes, so that a rank reads its
numbers straight into its own tensors, and no rank ever assembles a whole tensor.

Of several replicas one is written, by the first rank along every axis along which a tensor is replicated.
Boxes and writer follow from the placement of a parameter on the mesh (common/comm/placement.py); no strategy is
named here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    SavePlan,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from common.comm.mesh import Mesh
from common.comm.placement import FlatShard, Split, placement, whole_shape


@dataclass(frozen=True)
class Entry:
    """Tensor of this rank, under its name on every mesh, with the placement of the parameter `like`.

    A single number that goes with a longer parameter, such as an optimizer's step, is the same on all its
    shards.
    """

    name: str
    tensor: Tensor
    like: Tensor

    @property
    def splits(self) -> dict[str, Split]:
        """Axes along which the tensor is split. Raises ValueError for a shape other than its parameter's."""
        if self.tensor.shape == self.like.shape:
            return placement(self.like)
        if self.tensor.dim() == 0:
            return {}
        shapes = f"{tuple(self.tensor.shape)} goes with a parameter {tuple(self.like.shape)}"
        raise ValueError(f"{self.name} {shapes}: how does it lie?")

    def whole(self, mesh: Mesh) -> torch.Size:
        """Return the shape of the whole tensor of which this entry is a shard."""
        return whole_shape(self.like, mesh) if self.tensor.shape == self.like.shape else self.tensor.shape


@dataclass(frozen=True)
class Piece:
    """Box of the whole tensor `name`, at `offsets`, as large as `tensor`, a view of this rank's numbers."""

    name: str
    whole: torch.Size
    offsets: torch.Size
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in the library's type."""
        return ChunkStorageMetadata(self.offsets, self.tensor.shape)

    @property
    def index(self) -> MetadataIndex:
        """Key of the box among all boxes: the tensor's name and the offsets."""
        return MetadataIndex(self.name, self.offsets)


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that numbers start..stop of a flattened tensor fill, in the order of the numbers."""
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    first, end = -(-start // row), stop // row  # whole rows

    def inside(i: int, start: int, stop: int) -> Iterator[Box]:
        return (((i, *offsets), (1, *sizes)) for offsets, sizes in boxes_of_run(rest, start, stop))

    if first > end:
        yield from inside(end, start - end * row, stop - end * row)
        return
    yield from inside(first - 1, start - (first - 1) * row, row)
    if first < end:
        yield (first, *(0 for _ in rest)), (end - first, *rest)
    yield from inside(end, 0, stop - end * row)


def boxes(shape: Sequence[int], splits: dict[str, Split], mesh: Mesh) -> list[Box]:
    """List this rank's boxes of a whole tensor of `shape`, cut along these axes, in the order of its numbers.

    Raises ValueError for a cut through a run.
    """
    inner, origin, run = list(shape), [0] * len(shape), None
    for axis, split in splits.items():
        at = mesh.rank_along(axis)
        if run is not None:
            raise ValueError(f"cut along {axis} after a run, which has no rows; let the run be the last cut")
        if isinstance(split, FlatShard):
            start = sum(split.sizes[:at])
            run = start, start + split.sizes[at]
        else:
            n = mesh.shape[axis]
            lengths = split.sizes or (inner[split.dim] // n,) * n
            origin[split.dim] += sum(lengths[:at])
            inner[split.dim] = lengths[at]
    start, stop = run or (0, math.prod(inner))
    return [
        (tuple(a + b for a, b in zip(origin, offsets, strict=True)), sizes)
        for offsets, sizes in boxes_of_run(inner, start, stop)
    ]


def pieces(entry: Entry, mesh: Mesh) -> list[Piece]:
    """Return the entry as boxes of the whole tensor, each a view of the entry's own numbers."""
    whole, x = entry.whole(mesh), entry.tensor.detach()
    found = boxes(whole, entry.splits, mesh)
    parts = x.split([math.prod(sizes) for _, sizes in found]) if len(found) > 1 else (x,)
    return [
        Piece(entry.name, whole, torch.Size(offsets), part.view(sizes))
        for (offsets, sizes), part in zip(found, parts, strict=False)  # an empty entry has no box
    ]


def writes(entry: Entry, mesh: Mesh) -> bool:
    """Return True if this rank writes the entry, among all ranks that hold the same numbers."""
    tied = getattr(entry.like, "tied", None)
    if tied is not None and tied.rank > 0:
        return False
    split = {
        "pp",
        *(axis for axes in entry.splits for axis in axes.split("+")),
    }  # stages hold different parameters
    return all(at == 0 for axis, at in mesh.at.items() if axis not in split)


class SavePieces(DefaultSavePlanner):
    """Planner that writes this rank's boxes. The library checks that all boxes fill each tensor once."""

    def __init__(self, mine: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.mine = {piece.index: piece for piece in mine}

    def create_local_plan(self) -> SavePlan:
        """Plan one item per box."""
        return SavePlan(
            [
                WriteItem(
                    index,
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(p.chunk, TensorProperties(p.tensor.dtype), p.whole),
                )
                for index, p in self.mine.items()
            ]
        )

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        return all_plans  # keep duplicates: the library then reports them

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the numbers of a box."""
        return self.mine[index].tensor


class LoadPieces(DefaultLoadPlanner):
    """Planner that reads this rank's boxes from the overlapping stored boxes, straight into its tensors."""

    def __init__(self, mine: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.mine = {piece.index: piece for piece in mine}

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Store the checkpoint's metadata."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Plan one item per pair of overlapping boxes. Raises ValueError if they do not fill a piece."""
        assert self.metadata is not None
        items = []
        for piece in self.mine.values():
            written = self.metadata.state_dict_metadata[piece.name]
            assert isinstance(written, TensorStorageMetadata)
            found = create_read_items_for_chunk_list(piece.name, written, [piece.chunk])
            if sum(math.prod(item.lengths) for item in found) != piece.tensor.numel():
                raise ValueError(f"the boxes of {piece.name!a:.80} do not fill it")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor into which a box is read."""
        return self.mine[index].tensor
