"""Model and batches of the lessons that train: a global batch, cut over ranks and micro-batches.

B samples of the global batch  S sequence
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from common.comm import Group
from common.data.text import PADDING, Text, lm_batch, load_text, rank_slice
from common.errors import UsageError
from common.launch.command_line import Size
from common.lesson.runner import DTYPES, LessonOptions
from common.models import known
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


class KnownBatches(Batches):
    """Batches of the step whose numbers are known from transformers."""

    def load(self) -> Text:
        """Return bytes by formula."""
        return known.text()


def known_step(model: Transformer, device: torch.device) -> Tensor:
    """Run a step on one device, in two micro-batches, on a known model; return the loss, leave gradients."""
    o = TrainingOptions(seed=0, batch=known.BATCH, sequence=known.SEQUENCE)
    parts = KnownBatches(o, Group.alone(), device).parts(0)
    count = sum(targets.ne(PADDING).sum() for *_, targets in parts)
    losses = [cross_entropy_sum(model(tokens_BS), targets_BS)[0] / count for tokens_BS, targets_BS in parts]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).sum().detach()


def timed_adamw(tensors: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of timed steps."""
    return torch.optim.AdamW(tensors, lr=1e-3)
