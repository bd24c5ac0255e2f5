"""Parallel against one device: the same steps on both, and the largest difference of each kind, by name.

    reference = watch(one_device(job), job)          # on one device
    parallel = watch(train(job), job, mesh)          # on the mesh; gathers what is split
    compare(reference, parallel)["gradients"]        # Difference(2.2e-16, "layers.0.mlp.up_proj.weight, step 2")

The difference of a tensor is relative, a from the one device and M the largest number of all tensors compared with it
(the gradients of one step, say, or the weights):

    max|a - b| / max(max|a|, (4 eps / tolerance) M)

Rounding enters where sums are made, at the scale of weights and activations. A tensor that is small because large terms
cancelled keeps that rounding: the gradient of a key bias is nothing else (softmax does not see a shift of all scores),
and after a step of SGD those of q_proj and k_proj are 1e-8 M. So 4 eps M, four roundings of the largest number, is
within the tolerance for any tensor, and above (4 eps / tolerance) M, 9e-4 M in float64, a tensor is measured by itself.

A second measure, `in_ulps`, catches errors in small tensors: max|a - b| over max|a - a'| of the same tensor, where a'
is from one device whose initial weights were moved by one unit in the last place, up or down at random. Tensor by
tensor, because the units differ by 1e15: key biases move by all of their size. Honest runs reach 15; 100 is refused.

Tolerances: the same arithmetic in the same order, 0; sums in another order, 1e-12 in float64 (about 4000
roundings of 2^-52) and 1e-5 in float32. AdamW divides by sqrt(v) + eps: where a gradient is zero up to rounding
it enlarges that rounding by lr / eps, and it hides any constant factor on the gradients. So eps is LLaMA 2's
1e-5 (arXiv:2307.09288, section 2.2), with which the tolerance holds, and SGD always runs beside it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from common import comm
from common.comm import ledger
from common.comm.checked.asked import if_asked
from common.comm.mesh import AXES, Mesh
from common.comm.placement import FlatShard, gradient_norm, placement

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
KINDS = ("loss", "gradients", "gradient norm", "weights")
ROUNDINGS = 4  # of the largest number, that are within the tolerance for any tensor
ULPS = 100  # units of `in_ulps` that are refused

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5),
}


@dataclass
class Followed:
    """Results of a training run: per step the loss, every gradient and their norm; the final weights.

    Tensors are whole and under their canonical names; a gradient that is None is left out. units: of a run that
    `with_units` made, by kind and suffix, how far each tensor moves.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    units: list[dict[str, float]] | None = None

    def sets(self) -> list[tuple[str, str, dict[str, Tensor]]]:
        """Return (kind, suffix of the names, tensors) of each set of tensors that is compared as one."""
        losses, norms = (
            {f"{what}, step {t}": torch.tensor(v, dtype=torch.float64) for t, v in enumerate(values)}
            for what, values in (("loss", self.losses), ("norm", self.norms))
        )
        gradients = [("gradients", f", step {t}", of_step) for t, of_step in enumerate(self.gradients)]
        return [("loss", "", losses), *gradients, ("gradient norm", "", norms), ("weights", "", self.weights)]


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one kind, and where it is."""

    value: float
    where: str


def worst(differences: Iterable[Difference]) -> Difference:
    """Return the largest difference; 0 if there is none."""
    return max(differences, key=lambda d: d.value, default=Difference(0.0, ""))


def whole(x: Tensor, parameter: Tensor, mesh: Mesh | None) -> Tensor:
    """Return the full tensor of which x is this rank's piece, placed on the mesh like `parameter`."""
    with ledger.uncounted(), torch.no_grad():
        if hasattr(x, "full_tensor"):  # a DTensor
            return cast(Tensor, x.full_tensor())
        x = x.detach().clone()
        for axis, split in reversed(placement(parameter).items()):
            assert mesh is not None
            if isinstance(split, FlatShard):
                x = comm.all_gather(x, mesh.group(*axis.split("+")), 0, split.sizes).view(split.shape)
            else:
                x = comm.all_gather(x, mesh.group(axis), split.dim, split.sizes)
    return x


def of_all_stages(tensors: dict[str, Tensor], mesh: Mesh | None) -> dict[str, Tensor]:
    """Return the tensors of all ranks along pp. If two copies differ, keep both under distinct names."""
    if mesh is None or mesh.shape["pp"] == 1:
        return tensors
    found: dict[str, Tensor] = {}
    # arrays are pickled three times faster than tensors
    arrays = {name: x.numpy(force=True) for name, x in tensors.items()}
    for rank, theirs in enumerate(comm.everyones(arrays, mesh.group("pp"))):
        for name, array in theirs.items():
            x = torch.from_numpy(array)
            if not torch.equal(found.setdefault(name, x), x):
                found[f"{name} of pp rank {rank}"] = x
    return found


class Trained(Protocol):
    """A run that has, from its first step on, the owner of the parameters that its optimizer updates."""

    owner: Named | None


class Named(Protocol):
    """A module, or anything else that owns parameters under canonical names."""

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]: ...


def watch(run: Iterator[Tensor], trained: Trained, mesh: Mesh | None = None, check: bool = True) -> Followed:
    """Run a training loop to its end; return losses, gradients, norms and weights.

    run: yields each step's loss of the global batch, and leaves the summed gradients until it goes on. check:
    check the placements if --check was given.
    """
    with if_asked(mesh if check else None):
        return _watch(run, trained, mesh)


def _watch(run: Iterator[Tensor], trained: Trained, mesh: Mesh | None) -> Followed:
    result, named = Followed(), dict[str, Tensor]()
    for loss in run:
        assert trained.owner is not None, "a training loop makes its optimizer by job.optimizer"
        named = dict(trained.owner.named_parameters())
        gradients = {name: whole(p.grad, p, mesh) for name, p in named.items() if p.grad is not None}
        result.losses.append(loss.item())
        result.gradients.append(of_all_stages(gradients, mesh))
        if mesh is None:
            # the kernel of gradient_norm: in a sum of equal squares, such as those of signs, all roundings
            # have one direction, and another kernel's result differs by more than 100 units
            squares = [torch.linalg.vector_norm(g).double().square() for g in result.gradients[-1].values()]
            result.norms.append(math.sqrt(sum(squares, torch.zeros(())).item()))
        else:
            result.norms.append(gradient_norm(named.values(), mesh).item())
    result.weights = of_all_stages({name: whole(p, p, mesh) for name, p in named.items()}, mesh)
    return result


Model = TypeVar("Model", bound=Named)
Start = Callable[[Any], Any]
"""Function that takes a new model, moves its weights or not, and returns it."""


@torch.no_grad()
def moved(model: Model) -> Model:
    """Move each weight of the model by one unit in the last place, up or down at random; return the model."""
    draw = torch.Generator().manual_seed(0)
    for _, p in model.named_parameters():
        up_or_down = (2 * torch.randint(2, p.shape, generator=draw) - 1) * math.inf
        p.copy_(torch.nextafter(p, up_or_down.to(p)))
    return model


def unmoved(model: Model) -> Model:
    """Return the model unchanged."""
    return model


def with_units(run: Callable[[Start], Followed]) -> Followed:
    """Train twice on one device, once with moved weights; return the unmoved run with its units.

    `run(start)` passes its new model through `start`.
    """
    other, result = run(moved), run(unmoved)
    result.units = [
        {name: _size(x - b[name]) for name, x in a.items() if name in b}
        for (*_, a), (*_, b) in zip(result.sets(), other.sets(), strict=True)
    ]
    return result


def _size(x: Tensor) -> float:
    """Return max|x|, infinite if any element is not finite."""
    value = x.abs().max().item() if x.numel() else 0.0
    return value if math.isfinite(value) else math.inf


def _largest(
    reference: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    suffix: str,
    scale: Callable[[str, Tensor], float],
) -> Difference:
    """Return the largest difference of a tensor over its scale.

    It is infinite if names or shapes differ, if there is no tensor, where a difference is not finite, and
    for any difference at a scale of 0.
    """
    if odd := set(reference) ^ set(other):
        return Difference(math.inf, f"{min(odd)} on one side only{suffix}")
    if not reference:
        return Difference(math.inf, f"nothing to compare{suffix}")
    found = []
    for name, a in reference.items():
        b = other[name].to(a.device)
        if a.shape != b.shape:
            return Difference(math.inf, f"{name}: {tuple(a.shape)} against {tuple(b.shape)}{suffix}")
        value, unit = _size(a - b), scale(name, a)
        if 0 < value < math.inf:
            value = value / unit if unit else math.inf
        found.append(Difference(value, name + suffix if value > 0 else ""))
    return worst(found)


def largest(reference: Mapping[str, Tensor], other: Mapping[str, Tensor], suffix: str = "") -> Difference:
    """Return the largest relative difference between two dictionaries of tensors."""
    model = max((_size(a) for a in reference.values()), default=0.0)

    def scale(_: str, a: Tensor) -> float:
        return max(_size(a), ROUNDINGS * torch.finfo(a.dtype).eps / TOLERANCE[a.dtype] * model)

    return _largest(reference, other, suffix, scale)


def difference(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| / max|a| of one tensor."""
    return largest({"": a}, {"": b}).value


def compare(reference: Followed, other: Followed) -> dict[str, Difference]:
    """Return the largest difference of each of KINDS; infinite if the numbers of steps differ."""
    if len(reference.losses) != len(other.losses):
        steps = f"{len(reference.losses)} against {len(other.losses)} steps"
        return dict.fromkeys(KINDS, Difference(math.inf, steps))
    found = [
        (kind, largest(a, b, suffix))
        for (kind, suffix, a), (*_, b) in zip(reference.sets(), other.sets(), strict=True)
    ]
    return {kind: worst(d for k, d in found if k == kind) for kind in KINDS}


def in_ulps(reference: Followed, other: Followed) -> Difference:
    """Return the largest difference in units; a unit is at least one rounding of the tensor's largest number.

    A tensor has no unit, and is left out, if it is zero on one device, or if moved weights make it infinite
    or absent.
    """
    if reference.units is None or len(reference.losses) != len(other.losses):
        return Difference(math.inf, "nothing to measure with")
    found = []
    kept = (torch.finfo(w.dtype).eps for w in reference.weights.values())
    eps = max(kept, default=torch.finfo(torch.float64).eps)  # of the run, whose losses are kept in float64
    for units, (_, suffix, a), (*_, b) in zip(reference.units, reference.sets(), other.sets(), strict=True):

        def scale(name: str, x: Tensor, units: dict[str, float] = units) -> float:
            own = eps * _size(x)
            return max(own, units.get(name, math.inf)) if own else math.inf

        found.append(_largest(a, b, suffix, scale))
    return worst(found)


def worst_of_world(found: dict[str, Difference], mesh: Mesh) -> dict[str, Difference]:
    """Return the largest values over all ranks; the names are this rank's own."""
    values = torch.tensor([d.value for d in found.values()], dtype=torch.float64)
    group = mesh.group(*AXES)
    comm.all_reduce(values, group, "max")
    return {k: Difference(v, found[k].where) for k, v in zip(found, values.tolist(), strict=True)}


def unequal_replicas(named: Iterable[tuple[str, Tensor]], mesh: Mesh) -> list[str]:
    """Return the names of parameters whose replicas differ in any bit. All ranks call it.

    Such replicas drift apart: each takes its own steps, and no message makes them equal again.
    """
    mine = {}
    for name, p in named:
        piece = (name, *((axis, mesh.rank_along(axis)) for axis in placement(p)))
        mine[piece] = hashlib.sha256(p.detach().cpu().numpy().tobytes()).hexdigest()
    found: dict[tuple[object, ...], set[str]] = {}
    for of_rank in comm.everyones(mine, mesh.group(*AXES)):
        for piece, bits in of_rank.items():
            found.setdefault(piece, set()).add(bits)
    return sorted({str(piece[0]) for piece, bits in found.items() if len(bits) > 1})
