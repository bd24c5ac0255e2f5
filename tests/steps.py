"""A training step with seams, into which tests put strategies and the museum its mistakes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.lesson.equality import OPTIMIZERS, Followed, MakeOptimizer, Named, watch
from common.lesson.training import Batches, timed_adamw
from common.models.dropout import Dropout
from common.models.transformer import cross_entropy_sum

Wrap = Callable[[MakeOptimizer, list[Tensor]], torch.optim.Optimizer]
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# run(parts, scale, begin): the sum of the losses. Calls begin(i) before each pass of micro-batch i through a part of
# the model; what it back-propagates are losses times `scale`.
Run = Callable[[list[tuple[Tensor, ...]], float, Callable[[int], None]], Tensor]


def plain(make: MakeOptimizer, tensors: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer as `make` makes it."""
    return make(tensors)


@dataclass
class Trained:
    """A run whose optimizer updates the parameters of `owner`."""

    owner: Named | None


def follow(
    model: Named,
    optimizer: str,
    steps: int,
    step: Callable[[int], Tensor],
    mesh: Mesh | None = None,
    wrap: Wrap = plain,
) -> Followed:
    """Train `steps` steps; return losses, gradients, norms and weights.

    `step(t)` leaves synchronised gradients and returns the loss of the global batch. wrap: makes the
    optimizer, if it is more than torch's own.
    """

    def train() -> Iterator[Tensor]:
        chosen = wrap(OPTIMIZERS[optimizer], [p for _, p in model.named_parameters()])
        for t in range(steps):
            chosen.zero_grad()
            yield step(t)  # gradients are read before the optimizer, which may change them: a scaler's does
            chosen.step()

    return watch(train(), Trained(model), mesh)


@dataclass
class Version:
    """A model under a strategy, and the functions of the strategy that the training step calls."""

    model: nn.Module
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    finish: Callable[[], None] = lambda: None
    averages: bool = False  # DDP divides the sum by the number of ranks
    owner: Named | None = None  # has what the optimizer steps on, where that is not the model
    wrap: Wrap = plain
    loss: Loss = cross_entropy_sum
    split: Callable[..., tuple[Tensor, ...]] = lambda *part: part  # what this rank takes of a micro-batch
    run: Run | None = (
        None  # forward and backward of all micro-batches, where that is more than one after the other
    )

    def __post_init__(self) -> None:
        self.parameters = [p for _, p in (self.owner or self.model).named_parameters()]
        self.dropouts = [
            module for module in self.model.modules() if isinstance(module, Dropout) and module.p > 0
        ]


def training_step(version: Version, batches: Batches, group: Group) -> Callable[[int], Tensor]:
    """Return step(t): forward and backward of global step t; it leaves summed gradients and returns the global loss.

    group: the ranks that see different tokens.
    """

    def step(t: int) -> Tensor:
        parts = [version.split(*part) for part in batches.parts(t)]
        targets = torch.stack([y.ne(-100).sum() for *_, y in parts]).sum()
        comm.all_reduce(targets, group)
        scale = (group.size if version.averages else 1) / targets.item()

        def begin(i: int) -> None:
            for dropout in version.dropouts:
                dropout.step, dropout.first_sample = t, batches.samples()[i][0]

        loss = (version.run or partial(accumulate, version))(parts, scale, begin)
        version.finish()
        comm.all_reduce(loss, group)
        return loss / targets.item()

    return step


def accumulate(
    version: Version, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]
) -> Tensor:
    """Run one micro-batch after the other; return the sum of their losses. Gradients are sent with the last."""
    loss = parts[0][-1].new_zeros((), dtype=version.parameters[0].dtype)
    for i, (*inputs, targets_BS) in enumerate(parts):
        begin(i)
        with version.no_sync() if i < len(parts) - 1 else nullcontext():
            total, _ = version.loss(version.model(*inputs), targets_BS)
            (total * scale).backward()
            loss += total.detach()
    return loss


def whole_step(version: Version, batches: Batches, group: Group) -> Callable[[], None]:
    """Return step(): zero_grad, forward, backward and AdamW on the next batch."""
    optimizer = version.wrap(timed_adamw, version.parameters)
    step, at = training_step(version, batches, group), itertools.count()

    def whole() -> None:
        optimizer.zero_grad()
        step(next(at))
        optimizer.step()

    return whole
