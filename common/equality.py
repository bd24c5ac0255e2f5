"""Parallel against one device: the same steps on both, and the largest difference of each kind, by name.

    reference = follow(model, "adamw", steps, step)                  # on one device
    parallel = follow(model, "adamw", steps, step, mesh)             # on the mesh; gathers what is split
    compare(reference, parallel)["gradients"]    # Difference(2.2e-16, "layers.0.mlp.up_proj.weight, step 2")

A difference is relative: max|a - b| / max|a| of the tensor, a from the one device. A tensor that is zero up
to rounding (below 64 epsilons of its type times the model's largest number) is measured on the model's scale:
the gradient of a key bias, say, is zero because softmax does not see a shift of all scores, and rounding is
all that is left of it.

Tolerances: the same arithmetic in the same order, 0; sums in another order, 1e-12 in float64 (about 4000
roundings of 2^-52) and 1e-5 in float32. AdamW divides by sqrt(v) + eps: where a gradient is zero up to rounding
it enlarges that rounding by lr / eps, and it hides any constant factor on the gradients. So eps is LLaMA 2's
1e-5 (arXiv:2307.09288, section 2.2), with which the tolerance holds, and SGD always runs beside it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from common import comm, ledger
from common.mesh import AXES, Mesh
from common.placement import Run, gradient_norm, placement

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
KINDS = ("loss", "gradients", "gradient norm", "weights")

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Wrap = Callable[[MakeOptimizer, list[Tensor]], torch.optim.Optimizer]


def plain(make: MakeOptimizer, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """The optimizer as it is."""
    return make(tensors)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5),
}


@dataclass
class Followed:
    """All that a training run leaves: per step the loss, every gradient and their norm; the last weights.

    Tensors are whole and under their canonical names; a gradient that is None is left out. The optimizer is as
    the last step left it.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Any = None


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one kind, and where it is."""

    value: float
    where: str


def whole(x: Tensor, parameter: Tensor, mesh: Mesh | None) -> Tensor:
    """The full tensor of which x is this rank's piece, as `parameter` lies on the mesh."""
    with ledger.uncounted(), torch.no_grad():
        if hasattr(x, "full_tensor"):  # a DTensor
            return cast(Tensor, x.full_tensor())
        x = x.detach().clone()
        for axis, split in reversed(placement(parameter).items()):
            assert mesh is not None
            if isinstance(split, Run):
                x = comm.all_gather(x, mesh.group(axis), 0, split.sizes).view(split.shape)
            else:
                x = comm.all_gather(x, mesh.group(axis), split.dim, split.sizes)
    return x


def of_all_stages(tensors: dict[str, Tensor], mesh: Mesh | None) -> dict[str, Tensor]:
    """The tensors of all ranks along pp. Of what two ranks hold, both are kept, by two names, where they differ."""
    if mesh is None or mesh.shape["pp"] == 1:
        return tensors
    found: dict[str, Tensor] = {}
    for rank, theirs in enumerate(comm.everyones(tensors, mesh.group("pp"))):
        for name, x in theirs.items():
            if not torch.equal(found.setdefault(name, x), x):
                found[f"{name} of pp rank {rank}"] = x
    return found


class Named(Protocol):
    """A module, or anything else that owns parameters under canonical names."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


def follow(
    model: Named,
    optimizer: str,
    steps: int,
    step: Callable[[int], Tensor],
    mesh: Mesh | None = None,
    wrap: Callable[[MakeOptimizer, list[Tensor]], torch.optim.Optimizer] = lambda make, tensors: make(
        tensors
    ),
) -> Followed:
    """Train `steps` steps. `step(t)` leaves synchronised gradients and returns the loss of the global batch.

    wrap: makes the optimizer, where it is more than torch's own.
    """
    named = dict(model.named_parameters())
    chosen = wrap(OPTIMIZERS[optimizer], list(named.values()))
    result = Followed(optimizer=chosen)
    for t in range(steps):
        chosen.zero_grad()
        result.losses.append(step(t).item())
        gradients = {name: whole(p.grad, p, mesh) for name, p in named.items() if p.grad is not None}
        result.gradients.append(of_all_stages(gradients, mesh))
        if mesh is None:
            squares = [g.double().square().sum() for g in result.gradients[-1].values()]
            result.norms.append(math.sqrt(sum(squares, torch.zeros(())).item()))
        else:
            result.norms.append(gradient_norm(named.values(), mesh).item())
        chosen.step()
    result.weights = of_all_stages({name: whole(p, p, mesh) for name, p in named.items()}, mesh)
    return result


def largest(reference: Mapping[str, Tensor], other: Mapping[str, Tensor], suffix: str) -> Difference:
    """The worst tensor of two dictionaries; infinite where names, shapes or finiteness do not agree."""
    if odd := set(reference) ^ set(other):
        return Difference(math.inf, f"{min(odd)} on one side only{suffix}")
    if not reference:
        return Difference(math.inf, f"nothing to compare{suffix}")
    worst = Difference(0.0, "")
    model_scale = max((a.abs().max().item() for a in reference.values() if a.numel()), default=0.0)
    for name, a in reference.items():
        b = other[name].to(a.device)
        if a.shape != b.shape:
            return Difference(math.inf, f"{name}: {tuple(a.shape)} against {tuple(b.shape)}{suffix}")
        if a.numel() == 0:
            continue
        scale = a.abs().max().item()
        scale = scale if scale > 64 * torch.finfo(a.dtype).eps * model_scale else model_scale
        value = (a - b).abs().max().item() / (scale or 1.0)
        value = value if math.isfinite(value) else math.inf
        if value > worst.value:
            worst = Difference(value, name + suffix)
    return worst


def _scalars(what: str, values: list[float]) -> dict[str, Tensor]:
    return {f"{what}, step {t}": torch.tensor(v, dtype=torch.float64) for t, v in enumerate(values)}


def compare(reference: Followed, other: Followed) -> dict[str, Difference]:
    """The largest difference of each of KINDS. Different numbers of steps are an infinite difference."""
    if len(reference.losses) != len(other.losses):
        steps = f"{len(reference.losses)} against {len(other.losses)} steps"
        return dict.fromkeys(KINDS, Difference(math.inf, steps))
    gradients = [
        largest(a, b, f", step {t}")
        for t, (a, b) in enumerate(zip(reference.gradients, other.gradients, strict=True))
    ]
    return {
        "loss": largest(_scalars("loss", reference.losses), _scalars("loss", other.losses), ""),
        "gradients": max(gradients, key=lambda d: d.value),
        "gradient norm": largest(_scalars("norm", reference.norms), _scalars("norm", other.norms), ""),
        "weights": largest(reference.weights, other.weights, ""),
    }


def worst_of_world(found: dict[str, Difference], mesh: Mesh) -> dict[str, Difference]:
    """The largest values over all ranks; the names are this rank's own."""
    values = torch.tensor([found[kind].value for kind in KINDS], dtype=torch.float64)
    group = mesh.group(*AXES)
    if group.pg is not None and torch.distributed.get_backend(group.pg) == "nccl":
        values = values.cuda()
    comm.all_reduce(values, group, "max")
    return {k: Difference(v, found[k].where) for k, v in zip(KINDS, values.tolist(), strict=True)}


def unequal_replicas(named: Iterable[tuple[str, Tensor]], mesh: Mesh) -> list[str]:
    """Names of parameters of which two ranks hold the same piece with different bits. All ranks call it.

    Such replicas drift apart: each takes its own steps from then on, and nothing brings them together.
    """
    mine = {}
    for name, p in named:
        piece = (name, *((axis, mesh.at[axis]) for axis in placement(p)))
        mine[piece] = hashlib.sha256(p.detach().cpu().numpy().tobytes()).hexdigest()
    found: dict[tuple[object, ...], set[str]] = {}
    for of_rank in comm.everyones(mine, mesh.group(*AXES)):
        for piece, bits in of_rank.items():
            found.setdefault(piece, set()).add(bits)
    return sorted({str(piece[0]) for piece, bits in found.items() if len(bits) > 1})
