"""Reference of dp_local_sgd.py: n replicas on one device that train in turn and average every H steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from common import comm
from common.data.text import PADDING
from common.launch.command_line import Count, Within
from common.launch.runtime import Runtime
from common.lesson.equality import Followed, with_units
from common.lesson.job import Job, one_device

from dp_training import DataParallelOptions, batches_of_ranks, joined, on_one_device


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
    versions: tuple[str, ...] = ("local-sgd", "diloco", "torch")
    """Versions to run."""


def outer(name: str, o: LocalOptions) -> tuple[float, float]:
    """Return (η, μ) of a version."""
    return (o.rate, o.momentum) if name == "diloco" else (1.0, 0.0)


def train_replicas(job: Job[LocalOptions]) -> Iterator[Tensor]:
    """Train n replicas in turn; yield the loss of this rank's replica, which is `job.model`."""
    o, n, rank = job.options, job.rt.world_size, job.rt.rank
    rate, momentum = outer(job.version, o)
    batches = batches_of_ranks(o, n, job.rt.device)
    models = [job.model if r == rank else copy.deepcopy(job.model) for r in range(n)]
    jobs = [replace(job, model=models[r], make_batches=lambda *_, r=r: batches[r]) for r in range(n)]
    job.owner = job.model
    w = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in w.items()}
    targets = [0] * n
    for t, losses in enumerate(zip(*map(one_device, jobs), strict=True)):
        for r in range(n):
            targets[r] += sum(int(y.ne(PADDING).sum()) for _, y in batches[r].parts(t))
        if (t + 1) % o.every == 0:
            for name in w:
                replicas = [model.get_parameter(name).detach() for model in models]
                weighed = [p * count for p, count in zip(replicas, targets, strict=True)]
                delta = w[name] - torch.stack(weighed).sum(0) / sum(targets)
                m[name] = momentum * m[name] + delta
                w[name] = w[name] - rate * (delta + momentum * m[name])
                for p in replicas:
                    p.copy_(w[name])
            targets = [0] * n
        yield losses[rank]


def simulated(name: str, optimizer: str, rt: Runtime, o: LocalOptions) -> Followed:
    """Train n replicas in turn on one device; return the record of this rank's replica, with units."""
    return with_units(partial(on_one_device, rt, o, train_replicas, name, optimizer))


def mean_of_replicas(seen: Followed, job: Job[LocalOptions]) -> Followed:
    """Return losses and gradients as the mean over replicas, weighted by targets, and this rank's weights."""
    mean = Followed(weights=seen.weights)
    for loss, gradients, batch in zip(seen.losses, seen.gradients, job.batches(), strict=True):
        weight = batch.count_targets() / batch.count_targets(job.group)
        parts = {name: g * weight for name, g in gradients.items()}
        of_all = next(iter(parts.values())).new_tensor(loss * weight)
        for x in (of_all, *parts.values()):
            comm.all_reduce(x, job.group)
        mean.losses.append(of_all.item())
        mean.gradients.append(parts)
        mean.norms.append(joined(parts.values()).double().norm().item())
    return mean
