"""Targets of the gradient norm: random gradients cut over meshes of four ranks."""

import math
from typing import Any

import torch
from torch import Tensor

from common.comm import Group
from common.comm.mesh import AXES
from common.grade.targets import Wrong, counted, exactly, holds, target

import numpy as np  # isort: skip

MESHES = ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"ep": 2, "sp": 2})
KINDS = (set(), {"tp"}, {"ep"}, {"ep", "tp"}, {"dp"})  # axes that split a parameter; dp: ZeRO's shards


def case(
    mesh: dict[str, int], rank: int, rng: torch.Generator
) -> tuple[list[tuple[Tensor, set[str]]], dict[str, int], float, float]:
    """Return this rank's gradients, the whole shape, the right norm, and that of counting each rank's squares."""
    shape = {axis: mesh.get(axis, 1) for axis in AXES}
    at = dict(zip(AXES, map(int, np.unravel_index(rank, tuple(shape.values()))), strict=True))
    mine, right, every = [], 0.0, 0.0
    for stage in range(shape["pp"]):
        for number, axes in enumerate(KINDS):
            whole = torch.randn(12 + 2 * number + stage, 3, generator=rng, dtype=torch.float64)
            right += whole.square().sum().item()
            several = {axis for axis in axes if shape[axis] > 1}
            parts = math.prod(shape[axis] for axis in several)
            every += whole.square().sum().item() * math.prod(shape.values()) / shape["pp"] / parts
            place = 0
            for axis in AXES:
                if axis in several:
                    place = place * shape[axis] + at[axis]
            if at["pp"] == stage:
                mine.append((whole.tensor_split(parts)[place].clone(), several | {"pp"}))
    return mine, shape, math.sqrt(right), math.sqrt(every)


def same_norm(mine: Any, group: Group, rng: torch.Generator, mesh: dict[str, int]) -> None:
    """Compare one mesh's norm with that of the whole gradients."""
    gradients, shape, right, every = case(mesh, group.rank, rng)
    before = [g.clone() for g, _ in gradients]
    got = mine.gradient_norm(gradients, shape, group)
    shown = " ".join(f"{axis}={n}" for axis, n in mesh.items())
    holds(isinstance(got, float), f"mesh {shown}: the norm is a {type(got).__name__}, a float is needed")
    if abs(got - right) > 1e-12 * right:
        local = math.sqrt(sum(g.square().sum().item() for g in before))
        if abs(got - every) < 1e-12 * every:
            raise Wrong(
                f"mesh {shown}: the norm is {got:.6g}, {right:.6g} is right; it counts every replica's squares"
            )
        if abs(got - local) < 1e-12 * local:
            raise Wrong(
                f"mesh {shown}: the norm is {got:.6g}, {right:.6g} is right; it is that of this rank's gradients"
            )
        raise Wrong(
            f"mesh {shown}: the norm is {got:.6g}, {right:.6g} is right, {got / right:.6g} times that"
        )
    holds(
        all(torch.equal(g, b) for (g, _), b in zip(gradients, before, strict=True)),
        "the gradients were changed",
    )


@target("replicas count once", ranks=(4,))
def replicas(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Only dp."""
    same_norm(mine, group, rng, MESHES[0])


@target("parts count fully, on every mesh", ranks=(4,))
def parts(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Matrices over tp, experts over ep, ZeRO's shards over dp, stages over pp."""
    for mesh in MESHES[1:]:
        same_norm(mine, group, rng, mesh)


@target("one message of 8 bytes", ranks=(4,))
def one_message(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The squares are summed, not the gradients."""
    gradients, shape, *_ = case(MESHES[2], group.rank, rng)
    with counted("all_reduce") as ledger:
        mine.gradient_norm(gradients, shape, group)
    exactly("messages", len(ledger.rows), 1)
    exactly("bytes that it sends (3/4 of 8, twice)", ledger.bytes(), 12)
