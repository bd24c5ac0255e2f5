"""A training run as a lesson writes it: ordinary PyTorch, in a generator that yields each step's loss.

    def train(job):
        split(job.model, job.group)                          # the strategy, in place
        optimizer = job.optimizer(job.model)
        for batch in job.batches():                          # this rank's micro-batches of a global batch
            count, losses = batch.count_targets(job.group), []    # targets of all ranks
            optimizer.zero_grad()
            for tokens_BS, targets_BS in batch:
                loss_sum, _ = cross_entropy_sum(job.model(tokens_BS), targets_BS)
                loss = loss_sum / count
                loss.backward()
                losses.append(loss.detach())
            sum_gradients(job.model.parameters(), job.mesh)  # tokens are split, weights whole
            optimizer.step()
            yield total(losses, job.group)

At `yield` the loop stops with its gradients in place: equality.py reads them there, and measure.py its clock. So a
training loop contains nothing that compares, counts or times it. The runner chooses the optimizer: SGD and AdamW
in turn (OPTIMIZERS in equality.py) for the proof, AdamW for the times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.lesson.equality import MakeOptimizer, Named
from common.lesson.training import Batches, TrainingOptions
from common.models.dropout import Dropout
from common.models.transformer import Transformer, cross_entropy_sum

O = TypeVar("O", bound=TrainingOptions, covariant=True)  # noqa: E741
ALONE = Group.alone()
SAMPLE_AXES = ("dp", "ep")  # along these ranks have samples of their own; along the others all have the same

Train = Callable[["Job[Any]"], Iterator[Tensor]]
"""Training loop of a version: yields the loss of each global batch; gradients stay until the next step."""


@dataclass(frozen=True)
class Batch:
    """This rank's micro-batches of a global batch. Iterating yields each one's tensors, for one pass of the model."""

    step: int
    parts: list[tuple[Tensor, ...]]
    first_samples: list[int]
    """Number in the global batch of each micro-batch's first sample."""
    dropouts: list[Dropout]

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for i, part in enumerate(self.parts):
            self.begin(i)
            yield part

    def begin(self, i: int) -> None:
        """Prepare the model's dropouts for micro-batch i, so that they drop the same numbers on every mesh."""
        for dropout in self.dropouts:
            dropout.step, dropout.first_sample = self.step, self.first_samples[i]

    def cut(self, split: Callable[..., tuple[Tensor, ...]]) -> Batch:
        """Return the batch with split(*tensors) in place of each micro-batch's tensors."""
        return replace(self, parts=[split(*part) for part in self.parts])

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return (tokens_BS, targets_BS) of all micro-batches together."""
        tokens, targets = zip(*self.parts, strict=True)
        return torch.cat(tokens), torch.cat(targets)

    def count_targets(self, group: Group = ALONE) -> int:
        """Return the targets of all ranks of `group`, which see different tokens. Sends 2(n-1)/n * 8 bytes."""
        count = torch.stack([targets.ne(-100).sum() for *_, targets in self.parts]).sum()
        comm.all_reduce(count, group)
        return int(count.item())


@dataclass
class Job(Generic[O]):
    """A training run of one version: the plain model, the ranks along the lesson's axis, the batches."""

    rt: Runtime
    options: O
    version: str
    model: Transformer
    mesh: Mesh
    axis: str
    make_optimizer: MakeOptimizer
    steps: int | None = None
    """Number of steps; None: no limit."""
    make_batches: Callable[..., Batches] = Batches
    owner: Named | None = field(default=None, init=False)
    """After `optimizer`: the owner of the parameters that it steps on."""
    stepped: torch.optim.Optimizer | None = field(default=None, init=False)
    """The optimizer that was made."""

    @cached_property
    def group(self) -> Group:
        """The ranks along the lesson's axis."""
        return self.mesh.group(self.axis)

    def optimizer(self, owner: Named) -> torch.optim.Optimizer:
        """Return the run's optimizer for the parameters of `owner`: the model, or the holder of this rank's shards."""
        self.owner = owner
        self.stepped = self.make_optimizer([p for _, p in owner.named_parameters()])
        return self.stepped

    def numbers(self) -> Iterator[int]:
        """Return the numbers of the steps."""
        return itertools.count() if self.steps is None else iter(range(self.steps))

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's samples of every global batch: its own along dp and ep, else all of them."""
        samples = self.group if self.axis in SAMPLE_AXES else ALONE
        source = self.make_batches(self.options, samples, self.rt.device)
        dropouts = [m for m in self.model.modules() if isinstance(m, Dropout) and m.p > 0]
        for t in self.numbers():
            yield Batch(t, source.parts(t), [lo for lo, _ in source.samples()], dropouts)


def total(losses: list[Tensor], group: Group = ALONE) -> Tensor:
    """Return the sum of the losses of all micro-batches, and of all ranks of `group`: P to R, one number."""
    loss = torch.stack(losses).sum()
    comm.all_reduce(loss, group)
    return loss


def one_device(job: Job[Any]) -> Iterator[Tensor]:
    """Train the plain model on whole batches: the run that all others are compared with."""
    optimizer = job.optimizer(job.model)
    for batch in job.batches():
        count = batch.count_targets(job.group)  # of all ranks: an all-reduce of 8 bytes
        losses = []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = cross_entropy_sum(job.model(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        yield total(losses, job.group)
