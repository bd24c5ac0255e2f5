"""Reference of dp_local_sgd.py: n replicas on one device that train in turn and average every H steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.launch.command_line import Count, Within
from common.launch.runtime import Runtime
from common.lesson.equality import OPTIMIZERS, Followed, Start, with_units
from common.lesson.training import Batches, make_model
from common.models.transformer import cross_entropy_sum

from dp_training import DataParallelOptions

VERSIONS = ("local-sgd", "diloco", "torch")
Parts = list[tuple[Tensor, ...]]


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of all numbers, one after the other."""
    return torch.cat([t.detach().flatten() for t in tensors])


def local_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Parts, seen: Followed | None = None
) -> int:
    """Run one step on this replica's part of the batch, recorded in `seen`; return its number of targets."""
    targets, loss = sum(int(y.ne(-100).sum()) for _, y in parts), 0.0
    optimizer.zero_grad()
    for tokens_BS, targets_BS in parts:
        total, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
        (total / targets).backward()
        loss += total.item() / targets
    if seen:
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        seen.losses.append(loss)
        seen.gradients.append(gradients)
        seen.norms.append(joined(gradients.values()).double().norm().item())
    optimizer.step()
    return targets


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass
class LocalOptions(DataParallelOptions):
    """Options of the meetings: their interval, and the outer step."""

    steps: Count = 5
    """Training steps; where H does not divide them, the replicas are compared between two meetings."""
    every: Count = 2
    """H: number of steps between two meetings."""
    rate: Annotated[float, Within(1e-9, 1e9)] = 0.7
    """DiLoCo's outer learning rate η."""
    momentum: Annotated[float, Within(0, 0.999999)] = 0.9
    """DiLoCo's outer momentum μ."""
    curve_steps: Count = 192
    """With --plot: number of steps of the loss curves."""
    periods: tuple[Count, ...] = (4, 16, 64)
    """With --plot: values of H to compare."""
    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""


def outer(name: str, o: LocalOptions) -> tuple[float, float]:
    """Return (η, μ) of a version."""
    return (o.rate, o.momentum) if name == "diloco" else (1.0, 0.0)


def simulated(name: str, optimizer: str, rt: Runtime, o: LocalOptions) -> Followed:
    """Train n replicas in turn on one device; return the record of this rank's replica, with units."""
    return with_units(partial(_simulated, name, optimizer, rt, o))


def _simulated(name: str, optimizer: str, rt: Runtime, o: LocalOptions, start: Start) -> Followed:
    n, (rate, momentum) = rt.world_size, outer(name, o)
    models = [start(make_model(o, rt.device)) for _ in range(n)]
    chosen = [OPTIMIZERS[optimizer](list(model.parameters())) for model in models]
    groups = [Group("replica", r, n, tuple(range(n))) for r in range(n)]
    batches, seen = Batches(o, groups[0], rt.device), [Followed() for _ in range(n)]
    w, m = weights(models[0]), {name: torch.zeros_like(p) for name, p in weights(models[0]).items()}
    targets = [0] * n
    for t in range(o.steps):
        for r, batches.group in enumerate(groups):
            targets[r] += local_step(models[r], chosen[r], batches.parts(t), seen[r])
        if (t + 1) % o.every == 0:
            there = [weights(model) for model in models]
            for name in w:
                average = sum((there[r][name] * targets[r] for r in range(n)), torch.zeros_like(w[name]))
                delta = w[name] - average / sum(targets)
                m[name] = momentum * m[name] + delta
                w[name] = w[name] - rate * (delta + momentum * m[name])
                for model in models:
                    model.get_parameter(name).data.copy_(w[name])
            targets = [0] * n
    seen[rt.rank].weights = weights(models[rt.rank])
    return seen[rt.rank]


def mean_of_replicas(seen: Followed, targets: list[int], group: Group) -> Followed:
    """Return losses and gradients as the mean over replicas, weighted by targets, and this rank's weights."""
    mean = Followed(weights=seen.weights)
    for loss, gradients, count in zip(seen.losses, seen.gradients, targets, strict=True):
        flat = joined(gradients.values())
        flat = torch.cat([flat, flat.new_tensor([loss, 1.0])])
        flat *= count
        comm.all_reduce(flat, group)
        flat /= flat[-1].clone()
        pieces = flat[:-2].split([g.numel() for g in gradients.values()])
        mean.losses.append(flat[-2].item())
        mean.norms.append(flat[:-2].double().norm().item())
        mean.gradients.append(
            {name: piece.view_as(g) for (name, g), piece in zip(gradients.items(), pieces, strict=True)}
        )
    return mean
