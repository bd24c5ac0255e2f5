"""Making distributed tensors: in parallel, each rank its own piece, or from what one rank holds.

from_function(lambda i, j: i + j, (1000, 800), grid, Shard(0))
normal((1000, 800), grid, Shard(0), seed=1)               # the same numbers on any number of ranks
load("weights.safetensors", grid, Shard(1), name="layers.0.weight")
from_root(x if grid.world.rank == 0 else None, grid, Shard(0))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import comm
from common import random as by_position
from common.comm import ledger
from common.errors import UsageError
from common.tensors.grid import Grid
from common.tensors.layout import Layout, Partial, Placement, Replicate, Shard, integer
from common.tensors.tensor import DistributedTensor, on_one_rank, to_layout
from common.tensors.transfer import moved

Placements = Placement | Sequence[Placement]


def _laid_out(grid: Grid, shape: Sequence[int], placements: Placements) -> Layout:
    layout = Layout.of(grid, shape, placements)
    if layout.partial:
        raise UsageError("a new tensor is split or replicated: Partial() is the placement of a result")
    return layout


def _noted(grid: Grid, call: str) -> None:
    """Note a call that sends nothing: ranks whose calls differ get an error where they next communicate."""
    with grid.operation(call):
        pass


def from_function(
    function: Callable[..., Tensor],
    shape: Sequence[int],
    grid: Grid,
    placements: Placements,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DistributedTensor:
    """Return the tensor whose number at [i, j, ...] is function(i, j, ...). Sends nothing.

    function: of one index tensor per dimension, which broadcast against one another, as in `numpy.fromfunction`.

    Raises UsageError if what it returns does not broadcast to the indices.
    """
    layout = _laid_out(grid, shape, placements)
    _noted(grid, f"from_function({list(shape)} as {placements!r})")
    index = [
        torch.arange(lo, hi, device=device).view([-1 if d == k else 1 for d in range(len(shape))])
        for k, (lo, hi) in enumerate(layout.mine)
    ]
    made = torch.as_tensor(function(*index), device=device).to(dtype)
    try:
        piece = made.expand(layout.local_shape)
    except RuntimeError:
        shapes = f"{list(made.shape)} for a piece of {list(layout.local_shape)}"
        raise UsageError(f"from_function: the function returns {shapes}") from None
    return DistributedTensor(piece.contiguous(), layout)


def full(
    shape: Sequence[int],
    value: complex,
    grid: Grid,
    placements: Placements,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DistributedTensor:
    """Return a tensor of one value. Sends nothing."""
    layout = _laid_out(grid, shape, placements)
    _noted(grid, f"full({list(shape)}, {value}, {placements!r})")
    return DistributedTensor(torch.full(layout.local_shape, value, dtype=dtype, device=device), layout)


def _random(
    numbers: Callable[[int, int, Any], Any],
    shape: Sequence[int],
    grid: Grid,
    placements: Placements,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> DistributedTensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"{numbers.__name__} of {dtype}: give a floating-point or a complex type")
    seed = integer(seed, f"{numbers.__name__}: seed")
    layout = _laid_out(grid, shape, placements)
    _noted(grid, f"{numbers.__name__}({list(shape)}, seed={seed})")
    box = layout.mine or ((0, 1),)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(box))]
    axes = [
        np.arange(lo, hi, dtype=np.uint64) * np.uint64(n) for (lo, hi), n in zip(box, strides, strict=True)
    ]
    within = np.zeros((), np.uint64)  # positions in a row
    for axis in axes[1:]:
        within = np.add.outer(within, axis)
    made = torch.empty([len(axis) for axis in axes], dtype=dtype)
    # so many rows at a time that their positions take little memory
    height = max(1, by_position.CHUNK // max(1, within.size))
    for first in range(0, len(made), height):
        positions = np.add.outer(axes[0][first : first + height], within)
        parts = [torch.from_numpy(numbers(seed, k, positions)) for k in range(1 + dtype.is_complex)]
        made[first : first + height] = torch.complex(*parts) if dtype.is_complex else parts[0]
    return DistributedTensor(made.view(layout.local_shape).to(device), layout)


def uniform(
    shape: Sequence[int],
    grid: Grid,
    placements: Placements,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DistributedTensor:
    """Return numbers from [0, 1), which depend on the seed and the index alone. Sends nothing.

    Raises UsageError for a type of integers.
    """
    return _random(by_position.uniform, shape, grid, placements, seed, dtype, device)


def normal(
    shape: Sequence[int],
    grid: Grid,
    placements: Placements,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DistributedTensor:
    """Return standard normal numbers, which depend on the seed and the index alone. Sends nothing.

    The real and the imaginary part of complex numbers are standard normal each. Raises UsageError for a type of
    integers.
    """
    return _random(by_position.normal, shape, grid, placements, seed, dtype, device)


def tensor_of(whole: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor, or an array as one, without a copy where torch can read the array's memory.

    Raises UsageError for a type that torch does not have.
    """
    kind = f"an array of {whole.dtype}" if isinstance(whole, np.ndarray) else f"a {type(whole).__name__}"
    try:
        if isinstance(whole, np.ndarray):
            whole = np.asarray(whole, whole.dtype.newbyteorder("="), order="C")
        return torch.as_tensor(whole)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{kind}: torch makes no tensor of it") from None


def from_root(
    whole: Tensor | np.ndarray[Any, Any] | None, grid: Grid, placements: Placements, root: int = 0
) -> DistributedTensor:
    """Return the tensor, or array, that rank `root` holds, spread over all ranks; the others give None.

    Not differentiable. Rank `root` sends each rank its piece. Raises UsageError on every rank if `root` gives none, or
    an array of a type that torch does not have, or another rank gives one.
    """
    n = grid.world.size
    if not 0 <= root < n:
        raise UsageError(f"from_root: rank {root} of {n}; give one from 0 to {n - 1}")
    with grid.operation(f"from_root({placements!r}, root {root})"):
        problem = ""
        if grid.world.rank == root and not isinstance(whole, (Tensor, np.ndarray)):
            problem = "from_root: this rank must give a tensor or a NumPy array"
        elif grid.world.rank != root and whole is not None:
            problem = f"from_root: only rank {root} gives a tensor, the others None; from_full takes it on every rank"
        elif whole is not None:
            try:
                whole = tensor_of(whole)
            except UsageError as error:
                problem = f"from_root: {error}"
        grid.meet(problem)
        with ledger.uncounted():
            shape, dtype, device = comm.everyones(
                (tuple(whole.shape), whole.dtype, whole.device.type) if isinstance(whole, Tensor) else None,
                grid.world,
            )[root] or ((), torch.float32, "cpu")
        more = (1,) * max(0, len(grid.shape) - len(shape))
        before = on_one_rank(grid, (*shape, *more), root)
        target = _laid_out(grid, shape, placements)
        if isinstance(whole, Tensor) and grid.world.rank == root:
            piece = whole.detach().reshape((*shape, *more))
        else:
            piece = torch.empty(before.local_shape, dtype=dtype, device=device)
        wide = Layout.of(grid, (*shape, *more), target.placements)
        return DistributedTensor(moved(piece, before, wide).reshape(target.local_shape).contiguous(), target)


def from_full(whole: Tensor | np.ndarray[Any, Any], grid: Grid, placements: Placements) -> DistributedTensor:
    """Return a tensor, or array, that every rank holds whole, cut to its layout. Differentiable; sends nothing.

    The gradient of `whole` is complete on every rank: an all-gather sends it. Raises UsageError for an array of a type
    that torch does not have.
    """
    whole = tensor_of(whole)
    target = _laid_out(grid, whole.shape, placements)
    replicated = target.placed(*(Replicate() for _ in target.placements))
    with grid.operation(f"from_full({list(whole.shape)} to {target.placements})"):
        return to_layout(DistributedTensor(whole, replicated), target)


def from_pieces(piece: Tensor, shape: Sequence[int], grid: Grid, placements: Placements) -> DistributedTensor:
    """Return the tensor of which each rank gives its piece, or its term where a placement is Partial().

    Raises UsageError on every rank if a piece has not the shape of its box.
    """
    layout = Layout.of(grid, shape, placements)
    with grid.operation(f"from_pieces({list(shape)} {piece.dtype} as {placements!r})"):
        wrong = tuple(piece.shape) != layout.local_shape
        grid.meet(f"a piece of {list(piece.shape)}, needed is {list(layout.local_shape)}" if wrong else "")
    return DistributedTensor(piece, layout)


def load(
    path: str | Path,
    grid: Grid,
    placements: Placements,
    name: str | None = None,
    device: torch.device | str = "cpu",
) -> DistributedTensor:
    """Return a tensor of a .npy or .safetensors file; every rank reads its own piece.

    The type is the file's. name: of the tensor in a .safetensors file. Raises UsageError on every rank if a rank cannot
    read the file, or torch has no such type.
    """
    path, problem = Path(path), ""
    read: Callable[[tuple[slice, ...]], Tensor] | None = None
    shape: tuple[int, ...] = ()
    with grid.operation(f"load({path.name}, {name}, {placements!r})"):
        try:
            shape, read = _opened(path, name)
        except OSError as error:
            problem = f"{path}: {error.strerror or error}"
        except Exception as error:
            problem = f"{path}: {error or type(error).__name__}"
        grid.meet(problem)
        assert read is not None
        layout = _laid_out(grid, shape, placements)
        piece = read(tuple(slice(lo, hi) for lo, hi in layout.mine))
        return DistributedTensor(piece.to(device), layout)


def _opened(path: Path, name: str | None) -> tuple[tuple[int, ...], Callable[[tuple[slice, ...]], Tensor]]:
    if path.suffix == ".npy":
        array = np.lib.format.open_memmap(path, mode="r")
        native = array.dtype.newbyteorder("=")
        torch.from_numpy(np.empty(0, native))  # raises TypeError for what torch cannot hold
        return array.shape, lambda box: torch.from_numpy(np.array(array[box], native))
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        path.open("rb").close()  # its error has the reason alone as strerror; safe_open's repeats the path
        file = safe_open(path, "pt")
        if name not in file.keys():  # noqa: SIM118
            raise UsageError(f"no tensor {name!r}; it has {', '.join(sorted(file.keys())[:5])}")
        part = file.get_slice(name)
        return tuple(part.get_shape()), lambda box: part[box].contiguous()
    raise UsageError("give a .npy or a .safetensors file")


def from_dtensor(x: Any, grid: Grid) -> DistributedTensor:
    """Return a DTensor of torch on the same ranks; shares its piece. Sends nothing.

    Raises UsageError for placements that we do not have, such as a Partial with another operation than sum, and for a
    dimension that several axes cut unevenly.
    """
    from torch.distributed.tensor import Partial as TorchPartial
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    if tuple(x.device_mesh.shape) != grid.shape:
        raise UsageError(f"a DTensor on a mesh of {tuple(x.device_mesh.shape)}, but {grid}")
    placements: list[Placement] = []
    cut = [p.dim for p in x.placements if type(p) is TorchShard]
    for p, n in zip(x.placements, grid.shape, strict=True):
        if type(p) is TorchShard:
            placements.append(_as_torch_cuts(p.dim, n, tuple(x.shape), cut, grid))
        elif type(p) is TorchReplicate:
            placements.append(Replicate())
        elif type(p) is TorchPartial and p.reduce_op == "sum":
            placements.append(Partial())
        else:
            raise UsageError(f"a DTensor as {p}: it can be Shard, Replicate or Partial of a sum")
    return DistributedTensor(x.to_local(), Layout.of(grid, tuple(x.shape), placements))


def _as_torch_cuts(dim: int, n: int, shape: tuple[int, ...], cut: Sequence[int], grid: Grid) -> Shard:
    """Return the placement with which n ranks hold what torch gives them: the first ones ceil(L / n) of a length L.

    cut: the dimensions that the axes of the grid cut. Raises UsageError where several axes cut this one unevenly.
    """
    length = shape[dim]
    if cut.count(dim) == 1:
        each = -(-length // n)
        return Shard(dim, tuple(max(0, min(each, length - i * each)) for i in range(n)))
    if length % math.prod(grid.shape):
        raise UsageError(f"a DTensor: several axes cut dimension {dim} of {list(shape)} unevenly")
    return Shard(dim)


def to_dtensor(x: DistributedTensor, mesh: Any) -> Any:
    """Return x as a DTensor of torch on `mesh`, which has the same ranks in the same shape.

    Moves what torch cuts in another way: it gives the first ranks ceil(L / n) rows each. Raises UsageError for a
    dimension that several axes cut unevenly.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Partial as TorchPartial
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    if tuple(mesh.shape) != x.grid.shape:
        raise UsageError(f"a mesh of {tuple(mesh.shape)}, but {x.grid}")
    ours: list[Placement] = []
    theirs: list[Any] = []
    cut = [p.dim for p in x.placements if isinstance(p, Shard)]
    for p, n in zip(x.placements, x.grid.shape, strict=True):
        if isinstance(p, Shard):
            ours.append(_as_torch_cuts(p.dim, n, tuple(x.shape), cut, x.grid))
            theirs.append(TorchShard(p.dim))
        else:
            ours.append(p)
            theirs.append(TorchPartial() if isinstance(p, Partial) else TorchReplicate())
    local = x.redistribute(*ours).local
    strides = tuple(math.prod(x.shape[d + 1 :]) for d in range(x.ndim))
    return DTensor.from_local(local, mesh, theirs, run_check=False, shape=x.shape, stride=strides)
