"""The splits in libraries, to be timed beside ours: torch's DTensor, and Heat if installed.

Both libraries get the same shards as our own version, and return a result that stays sharded. They allocate
the result in each call; neither can write into a given buffer. Heat's `inner` leaves C split along its
columns.

DTensor: torch.distributed.tensor. Heat: Götz et al., "HeAT", IEEE BigData 2020; Heat communicates through
mpi4py, so it needs mpirun. Heat 1.8 asks pip for an older torch, but its products run on the installed one:
pip install --no-deps heat scipy, and a torchvision of torch's own build.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from common.launch.runtime import Runtime

from dp_matrices import SPLITS


def dtensor(split: str, a: Tensor, b: Tensor, rt: Runtime) -> Callable[[], Tensor] | None:
    """Return a function that computes C by DTensor; None for one rank. All shards must have the same size."""
    if rt.world.pg is None:
        return None
    mesh, lies = DeviceMesh.from_group(rt.world.pg, rt.device.type), SPLITS[split]

    def place(dim: int | None) -> list[Placement]:
        return [Replicate() if dim is None else Shard(dim)]

    whole_a = DTensor.from_local(a, mesh, place(lies.a), run_check=False)
    whole_b = DTensor.from_local(b, mesh, place(lies.b), run_check=False)

    def call() -> Tensor:
        b = whole_b.redistribute(placements=[Replicate()]) if split == "gathered" else whole_b
        c: Tensor = (whole_a @ b).redistribute(placements=place(lies.c)).to_local()  # type: ignore[attr-defined]
        return c

    return call


def heat(split: str, a: Tensor, b: Tensor, rt: Runtime) -> Callable[[], Tensor] | None:
    """Return a function that computes C by Heat; None if Heat is missing, or its ranks are not ours."""
    if rt.launcher not in ("openmpi", "mpich"):
        return None
    try:
        ht: Any = importlib.import_module("heat")
    except (ImportError, RuntimeError):  # also if an import of Heat's is missing or of another build
        return None
    lies = SPLITS[split]
    whole_a, whole_b = ht.array(a, is_split=lies.a), ht.array(b, is_split=lies.b)

    def call() -> Tensor:
        c: Tensor = ht.matmul(whole_a, whole_b).larray
        return c

    return call


def libraries(
    split: str, a: Tensor, b: Tensor, rt: Runtime, shape: tuple[int, int, int]
) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute C, by library; none if shards have different sizes."""
    if any(length % rt.world_size for length in shape):
        return {}
    calls = {"DTensor": dtensor(split, a, b, rt), "Heat": heat(split, a, b, rt)}
    return {name: call for name, call in calls.items() if call is not None}
