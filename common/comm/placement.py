"""Placement of a parameter on each axis, and the one rule from which synchronisation follows.

    A gradient is summed over exactly the axes along which tokens are split and its parameter is replicated.
    A parameter counts once in the gradient norm.

A strategy that splits a parameter declares that with `place(parameter, "tp", Shard(0))`; without a
declaration the parameter is replicated. Checkpoints, the norm, the equality check and the optimizers read
this one description.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group, sizes_of
from common.comm.mesh import AXES, Mesh
from common.errors import UsageError

TOKEN_AXES = ("dp", "ep", "sp")  # axes along which each rank sees other tokens


@dataclass(frozen=True)
class Shard:
    """Split on dimension `dim`, in the order of the ranks; `sizes` are the pieces' lengths if they differ."""

    dim: int
    sizes: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.sizes is None else f"Shard({self.dim}, {self.sizes})"


@dataclass(frozen=True)
class FlatShard:
    """Split of the flattened tensor: one run per rank, `sizes` numbers long, in the order of the ranks.

    `shape` is that of the tensor before it was cut; a size may be 0. The ranks may be those of several axes: such a
    split is placed along their names, joined as in `Group.axis`, "dp+ep".
    """

    shape: torch.Size
    sizes: tuple[int, ...]


Split = Shard | FlatShard


def place(parameter: Tensor, axis: str, split: Split) -> None:
    """Declare that `parameter` holds one piece along `axis`. Cuts are undone in the reverse order.

    Raises ValueError for an unknown axis.
    """
    if unknown := {*axis.split("+")} - {*AXES, "world"}:
        raise ValueError(f"axis {unknown.pop()!r} is unknown; the axes are {', '.join(AXES)}")
    parameter.placement = {**placement(parameter), axis: split}  # type: ignore[attr-defined]


def placement(parameter: Tensor) -> dict[str, Split]:
    """Return the axes along which `parameter` is split, in the order of the cuts; all others replicate it.

    A DTensor carries its own placement; the names of its mesh are our axes.
    """
    if mesh := getattr(parameter, "device_mesh", None):
        kinds = zip(mesh.mesh_dim_names, parameter.placements, strict=True)  # type: ignore[attr-defined]
        return {
            axis: Shard(kind.dim) for axis, kind in kinds if hasattr(kind, "dim")
        }  # also where cuts are nested
    return getattr(parameter, "placement", {})


def split_axes(parameter: Tensor) -> set[str]:
    """Return the axes along which `parameter` is split, one by one."""
    return {axis for axes in placement(parameter) for axis in axes.split("+")}


def local(x: Tensor) -> Tensor:
    """Return this rank's piece of a DTensor; any other tensor unchanged."""
    return x.to_local() if hasattr(x, "to_local") else x


def like(x: Tensor, parameter: Tensor) -> nn.Parameter:
    """Wrap x as a Parameter and copy the placement of `parameter`."""
    made = nn.Parameter(x, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def shard(parameter: Tensor, group: Group, dim: int) -> nn.Parameter:
    """Return this rank's piece of a replicated parameter, placed; lengths along `dim` as `sizes_of` cuts.

    Raises UsageError if a rank would get nothing.
    """
    sizes = sizes_of(parameter.shape[dim], group.size)
    if sizes[-1] == 0:
        raise UsageError(f"{parameter.shape[dim]} rows or columns cannot be split over {group.size} ranks")
    begin = sum(sizes[: group.rank])
    piece = (
        parameter.detach().narrow(dim, begin, sizes[group.rank]).clone(memory_format=torch.contiguous_format)
    )
    cut = like(piece, parameter)
    place(cut, group.axis, Shard(dim, tuple(sizes)))
    return cut


def whole_shape(parameter: Tensor, mesh: Mesh) -> torch.Size:
    """Return the shape of the tensor of which `parameter` is this rank's piece."""
    shape = parameter.shape
    for axis, split in reversed(placement(parameter).items()):
        if isinstance(split, FlatShard):
            shape = split.shape
        else:
            lengths = split.sizes or (shape[split.dim],) * mesh.shape[axis]
            shape = torch.Size((*shape[: split.dim], sum(lengths), *shape[split.dim + 1 :]))
    return shape


def piece(whole: Tensor, parameter: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's piece of a whole tensor, a view, cut as `parameter`: inverse of `equality.whole`."""
    for axis, split in placement(parameter).items():
        at = mesh.rank_along(axis)
        if isinstance(split, FlatShard):
            whole = whole.flatten().narrow(0, sum(split.sizes[:at]), split.sizes[at])
        else:
            lengths = split.sizes or (whole.shape[split.dim] // mesh.shape[axis],) * mesh.shape[axis]
            whole = whole.narrow(split.dim, sum(lengths[:at]), lengths[at])
    return whole


def split_tokens_along(parameter: Tensor, axis: str) -> None:
    """Declare that also along `axis` each rank uses `parameter` on other tokens."""
    parameter.token_axes = (*getattr(parameter, "token_axes", ()), axis)  # type: ignore[attr-defined]


def tie(parameter: Tensor, group: Group) -> None:
    """Declare that the ranks of `group` hold this parameter together, though their axis splits the others."""
    parameter.tied = group  # type: ignore[attr-defined]


def sum_tied_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum each tied parameter's gradient over the ranks that hold it. Sends 2(n-1)/n of its bytes."""
    for p in parameters:
        group: Group | None = getattr(p, "tied", None)
        if group is not None and p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            comm.all_reduce(p.grad, group)


def gradient_axes(parameter: Tensor) -> tuple[str, ...]:
    """Return the axes over which the gradient of `parameter` is summed."""
    token_axes = (*TOKEN_AXES, *getattr(parameter, "token_axes", ()))
    return tuple(axis for axis in AXES if axis in token_axes and axis not in split_axes(parameter))


def sum_gradients(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Sum every gradient over its axes, in place: one message for all with the same placement and type.

    The rounding of a sum over many ranks depends on the number's position in the message. Replicas therefore
    share no message with pieces, whose sizes may differ from rank to rank, and stay equal to the bit. A
    parameter without a gradient takes part with zeros, since another rank may have one; a parameter that no
    rank used then has a gradient of zeros. Frozen parameters are left alone. Sends 2(n-1)/n of the gradients'
    bytes, n the ranks along the axes.
    """
    together: dict[tuple[tuple[str, ...], tuple[str, ...], torch.dtype], list[Tensor]] = {}
    for p in parameters:
        if p.requires_grad:
            together.setdefault((gradient_axes(p), tuple(placement(p)), p.dtype), []).append(p)
    for (axes, *_), members in together.items():
        group = mesh.group(*axes)
        if group.size > 1:
            flat = torch.cat(
                [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in members]
            )
            comm.all_reduce(flat, group)
            for p, piece in zip(members, flat.split([p.numel() for p in members]), strict=True):
                p.grad = piece.detach().view_as(p)  # autograd forbids in-place changes of split's views


def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh, also: Tensor | None = None) -> Tensor:
    """Return the 2-norm of the whole model's synchronised gradient, the same scalar on every rank.

    A gradient replicated on k ranks adds its squares k times to a sum over the world, so each rank gives
    1/k of them; pp ranks own different parameters and count as split, but for those that are tied.

    also: float64 numbers that are summed over the world in the same message, in place.
    """
    total = torch.zeros((), dtype=torch.float64)
    for p in parameters:
        if p.grad is not None:
            total = total.to(p.device)
            copies = p.tied.size if hasattr(p, "tied") else 1
            # a DTensor's gradient may have another placement than the parameter
            lies = split_axes(p.grad if hasattr(p.grad, "device_mesh") else p)
            for axis in AXES:
                if axis != "pp" and axis not in lies:
                    copies *= mesh.shape[axis]
            total += torch.linalg.vector_norm(local(p.grad)).double().square() / copies
    sums = total[None] if also is None else torch.cat([total[None], also.to(total.device)])
    comm.all_reduce(sums, mesh.group(*AXES))
    if also is not None:
        also.copy_(sums[1:])
    return sums[0].sqrt()


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor], mesh: Mesh, largest: float, also: Tensor | None = None
) -> Tensor:
    """Scale the gradients so that their global norm is at most `largest`; return the norm before scaling.

    As torch.nn.utils.clip_grad_norm_ on one device. also: see `gradient_norm`.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, mesh, also)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for p in parameters if largest < math.inf else ():
        if p.grad is not None:
            p.grad *= factor.to(p.grad.dtype)
    return norm
