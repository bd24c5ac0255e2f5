"""Which boxes of the whole tensors a rank holds: a checkpoint is a set of boxes, and no mesh is left in it.

    q_proj.weight [8, 6], tp = 2 by rows, then ZeRO over dp = 3: rank (tp 1, dp 1) has numbers 8..16 of rows 4..8

        row 4   0  1  2  3  4  5        Shard(0) along tp: rows 4..8, an origin to add
        row 5   6  7 [8  9 10 11]       Run along dp: one run of the flattened rows, which is not a box,
        row 6 [12 13 14 15]16 17        but two of them: 1 x 4 at (5, 2) and 1 x 4 at (6, 0)
        row 7  18 19 20 21 22 23

A run of a tensor of d dimensions fills 2 d - 1 boxes at the most: what it has of its first row, whole rows, what it
has of its last; and the same again inside of the first and the last. Any other mesh cuts the same tensor into other
boxes. torch.distributed.checkpoint finds what two sets of boxes have in common, so that a rank reads what it needs
straight to where it belongs, and no rank ever puts a tensor together.

Of what several ranks hold alike one rank writes, the first along every axis along which a tensor is replicated. Both
follow from how a parameter lies on the mesh (common/placement.py); no strategy is named here.
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

from common.mesh import Mesh
from common.placement import Run, Split, placement, whole_shape


@dataclass(frozen=True)
class Entry:
    """Numbers of this rank under the name that they have on every mesh; they lie as the parameter `like` does.

    A single number that goes with a longer parameter, such as an optimizer's step, is the same on all its pieces.
    """

    name: str
    tensor: Tensor
    like: Tensor

    @property
    def splits(self) -> dict[str, Split]:
        """The axes along which it is split. Raises ValueError for a tensor of another shape than its parameter."""
        if self.tensor.shape == self.like.shape:
            return placement(self.like)
        if self.tensor.dim() == 0:
            return {}
        shapes = f"{tuple(self.tensor.shape)} goes with a parameter {tuple(self.like.shape)}"
        raise ValueError(f"{self.name} {shapes}: how does it lie?")

    def whole(self, mesh: Mesh) -> torch.Size:
        """The shape of the tensor of which this is a piece."""
        return whole_shape(self.like, mesh) if self.tensor.shape == self.like.shape else self.tensor.shape


@dataclass(frozen=True)
class Piece:
    """A box of the whole tensor `name`: at `offsets`, as large as `tensor`, which is a view of this rank's numbers."""

    name: str
    whole: torch.Size
    offsets: torch.Size
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box, as the library says it."""
        return ChunkStorageMetadata(self.offsets, self.tensor.shape)

    @property
    def index(self) -> MetadataIndex:
        """Where to find it among all boxes."""
        return MetadataIndex(self.name, self.offsets)


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that numbers start..stop of a flattened tensor fill, in the order of the numbers."""
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
    """What this rank holds of a whole tensor of `shape` that is cut along these axes, in the order of its numbers.

    Raises ValueError for a cut through a run.
    """
    inner, origin, run = list(shape), [0] * len(shape), None
    for axis, split in splits.items():
        at = mesh.at[axis]
        if run is not None:
            raise ValueError(f"cut along {axis} after a run, which has no rows; let the run be the last cut")
        if isinstance(split, Run):
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
    """The entry as boxes of the whole tensor, each a view of the entry's own numbers."""
    whole, x = entry.whole(mesh), entry.tensor.detach()
    found = boxes(whole, entry.splits, mesh)
    parts = x.split([math.prod(sizes) for _, sizes in found]) if len(found) > 1 else (x,)
    return [
        Piece(entry.name, whole, torch.Size(offsets), part.view(sizes))
        for (offsets, sizes), part in zip(found, parts, strict=False)  # of no numbers there is no box
    ]


def writes(entry: Entry, mesh: Mesh) -> bool:
    """Whether this rank is the one that writes the entry, of all that hold the same numbers."""
    tied = getattr(entry.like, "tied", None)
    if tied is not None and tied.rank > 0:
        return False
    split = {*entry.splits, "pp"}  # a stage's parameters are its own
    return all(at == 0 for axis, at in mesh.at.items() if axis not in split)


class SavePieces(DefaultSavePlanner):
    """Writes these boxes of this rank. The library checks that those of all ranks fill each tensor, and none twice."""

    def __init__(self, mine: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.mine = {piece.index: piece for piece in mine}

    def create_local_plan(self) -> SavePlan:
        """One item a box."""
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
        return all_plans  # a box that two ranks write is a mistake to be seen, not to be mended

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The numbers of a box."""
        return self.mine[index].tensor


class LoadPieces(DefaultLoadPlanner):
    """Reads these boxes of this rank, each out of the boxes that were written, straight into its numbers."""

    def __init__(self, mine: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.mine = {piece.index: piece for piece in mine}

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """What was written; what to read is known."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """One item for each pair of boxes that overlap. Raises ValueError for a piece that they do not fill."""
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
        """Where the numbers of a box go."""
        return self.mine[index].tensor
