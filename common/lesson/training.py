"""One training step: a global batch, cut over ranks and micro-batches, whatever strategy the model is under.

B samples of the global batch  S sequence
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.data.text import Text, lm_batch, load_text, rank_slice
from common.errors import UsageError
from common.launch.command_line import Size
from common.lesson.equality import Named, Wrap, plain
from common.lesson.runner import DTYPES, LessonOptions
from common.models import known
from common.models.dropout import Dropout
from common.models.transformer import Transformer, TransformerConfig, config, cross_entropy_sum

LARGEST_BATCH = 2**27  # tokens; more do not fit a machine that runs this


@dataclass
class TrainingOptions(LessonOptions):
    """Model and batch of the lessons that train."""

    model: str = "gpt2-tiny"
    """A name of common/models/configs.py."""
    batch: Size = 10
    """Samples of the global batch; ranks take parts that differ by one sample at the most."""
    sequence: Size = 32
    """Tokens of a sample."""
    micro_batches: Size = 2
    """Parts into which each rank cuts its samples to accumulate gradients."""
    benchmark: bool = False
    """Time steps in turn instead of proving equality."""
    scaling: Literal["strong", "weak"] = "strong"
    """With --benchmark: is --batch the batch of all ranks together, or of each?"""
    versions: tuple[str, ...] = ()
    """Versions to run."""

    def model_config(self) -> TransformerConfig:
        """Return the model's shape. Raises UsageError if no model has that name."""
        return config(self.model)


Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# run(parts, scale, begin): the sum of the losses. Calls begin(i) before each pass of micro-batch i through a part of
# the model; what it back-propagates are losses times `scale`.
Run = Callable[[list[tuple[Tensor, ...]], float, Callable[[int], None]], Tensor]


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


@dataclass
class Batches:
    """This rank's part of every global batch."""

    options: TrainingOptions
    group: Group
    device: torch.device
    text: Text = field(init=False)

    def __post_init__(self) -> None:
        o = self.options
        if o.batch * o.sequence > LARGEST_BATCH or o.micro_batches > o.batch * o.sequence:
            raise UsageError(
                f"--batch {o.batch} --sequence {o.sequence} --micro-batches {o.micro_batches}: give at most "
                f"{LARGEST_BATCH} tokens, and no more micro-batches than tokens"
            )
        if self.group.size > o.batch:
            raise UsageError(
                f"--batch {o.batch} is too small for {self.group.size} ranks; "
                f"give at least {self.group.size}, so that each rank has a sample"
            )
        self.text = self.load()

    def load(self) -> Text:
        """Return the text to train on."""
        return load_text(self.options.data)

    def take(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return (tokens_BS, targets_BS) of samples [lo, hi) of the step's global batch."""
        o = self.options
        return lm_batch(self.text.train, o.seed, step, o.batch, o.sequence, lo, hi)

    def samples(self) -> list[tuple[int, int]]:
        """Return the samples [lo, hi) of the global batch of each micro-batch; none is empty."""
        lo, hi = rank_slice(self.options.batch, self.group.rank, self.group.size)
        cuts = min(self.options.micro_batches, hi - lo)
        slices = [rank_slice(hi - lo, i, cuts) for i in range(cuts)]
        return [(lo + a, lo + b) for a, b in slices]

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """Return (tokens_BS, targets_BS) of each micro-batch."""
        batches = [self.take(step, lo, hi) for lo, hi in self.samples()]
        return [(tokens.to(self.device), targets.to(self.device)) for tokens, targets in batches]


def make_model(o: TrainingOptions, device: torch.device) -> Transformer:
    """Return the plain model, the same on every rank for the same seed. Raises RuntimeError if known numbers differ."""
    c = o.model_config()
    known.check(known_step, c, device)
    return Transformer(c, o.seed, DTYPES[o.dtype]).to(device)


def shape_of(o: TrainingOptions) -> Transformer:
    """Return the plain model without values, for formulas of bytes and operations."""
    with torch.device("meta"):
        return Transformer(o.model_config(), o.seed, DTYPES[o.dtype])


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


class KnownBatches(Batches):
    """Batches of the step whose numbers are known from transformers."""

    def load(self) -> Text:
        """Return bytes by formula."""
        return known.text()


def known_step(model: Transformer, device: torch.device) -> Tensor:
    """Run a lesson's step on one device, in two micro-batches, on a known model; return the loss."""
    o, alone = TrainingOptions(seed=0, batch=known.BATCH, sequence=known.SEQUENCE), Group.alone()
    return training_step(Version(model), KnownBatches(o, alone, device), alone)(0)


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


def timed_adamw(tensors: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of timed steps."""
    return torch.optim.AdamW(tensors, lr=1e-3)


def whole_step(version: Version, batches: Batches, group: Group) -> Callable[[], None]:
    """Return step(): zero_grad, forward, backward and AdamW on the next batch."""
    optimizer = version.wrap(timed_adamw, version.parameters)
    step, at = training_step(version, batches, group), itertools.count()

    def whole() -> None:
        optimizer.zero_grad()
        step(next(at))
        optimizer.step()

    return whole
