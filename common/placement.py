"""How a parameter lies on each axis, and the one rule that synchronisation follows from.

    A gradient is summed over exactly the axes along which tokens are split and its parameter is replicated.
    A parameter counts once in the gradient norm.

A strategy that splits a parameter says so with `place(parameter, "tp", Shard(0))`; what is not said is
replicated. Checkpoints, the norm, the equality check and the optimizers read this one description.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from common import comm
from common.mesh import AXES, Mesh

TOKEN_AXES = ("dp", "ep", "sp")  # axes along which each rank sees other tokens


@dataclass(frozen=True)
class Shard:
    """Split on dimension `dim`, in the order of the ranks."""

    dim: int


@dataclass(frozen=True)
class Run:
    """One run of the flattened tensor on each rank, `sizes` numbers long in the order of the ranks.

    `shape` is that of the tensor before it was cut; a size may be 0.
    """

    shape: torch.Size
    sizes: tuple[int, ...]


Split = Shard | Run


def place(parameter: Tensor, axis: str, split: Split) -> None:
    """Say that `parameter` holds one piece along `axis`. Cuts are undone in the reverse order.

    Raises ValueError for an axis that is none.
    """
    if axis not in (*AXES, "world"):
        raise ValueError(f"axis {axis!r} is unknown; the axes are {', '.join(AXES)}")
    parameter.placement = {**placement(parameter), axis: split}  # type: ignore[attr-defined]


def placement(parameter: Tensor) -> dict[str, Split]:
    """The axes along which `parameter` is split, in the order of the cuts; along all others it is replicated.

    A DTensor says it itself; the names of its mesh are our axes.
    """
    if mesh := getattr(parameter, "device_mesh", None):
        kinds = zip(mesh.mesh_dim_names, parameter.placements, strict=True)  # type: ignore[attr-defined]
        return {axis: Shard(kind.dim) for axis, kind in kinds if kind.is_shard()}
    return getattr(parameter, "placement", {})


def local(x: Tensor) -> Tensor:
    """This rank's piece of a DTensor; any other tensor is one."""
    return x.to_local() if hasattr(x, "to_local") else x


def gradient_axes(parameter: Tensor) -> tuple[str, ...]:
    """The axes over which the gradient of `parameter` is summed."""
    return tuple(axis for axis in TOKEN_AXES if axis not in placement(parameter))


def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """The 2-norm of the whole model's synchronised gradient, the same scalar on every rank.

    A gradient replicated on k ranks adds its squares k times to a sum over the world, so each rank gives
    1/k of them; pp ranks own different parameters and count as split.
    """
    total = torch.zeros((), dtype=torch.float64)
    for p in parameters:
        if p.grad is not None:
            total = total.to(p.device)
            copies = 1
            for axis in AXES:
                if axis != "pp" and axis not in placement(p):
                    copies *= mesh.shape[axis]
            total += local(p.grad).double().square().sum() / copies
    comm.all_reduce(total, mesh.group(*AXES))
    return total.sqrt()
