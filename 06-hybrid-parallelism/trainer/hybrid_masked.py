"""Masked language modelling: BERT's batches, in which a share of the tokens is hidden and has to be predicted.

    text       d   e   f       f   o   o   (   x   )        a sample of S tokens
    chosen         *               *                        round(0.15 S) places of each sample, at least 1
    tokens     d   ▮   f       f   q   o   (   x   )        of the chosen: 80 % the mask token ▮, 10 % a random
    targets    .   e   .   .   .   o   .   .   .   .        token, 10 % unchanged; . is -100 and does not count

The masks are a function of (seed, step, number of the sample in the global batch), without a generator's state. So
every mesh hides the same tokens, whichever rank holds the sample, and a resumed run hides those that it would have
hidden. The masks of the validation text depend on the seed and the sample alone, and are the same in each evaluation.

The loss is the sum of the cross-entropies divided by the number of targets of all ranks and micro-batches. Every
sample has a target, so that number is never 0; a rank's tokens of a sample, split over sp, may have none.

Devlin et al., "BERT", 2018, arXiv:1810.04805, section 3.1 and appendix A.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common import random
from common.data.text import PADDING, Text, rank_slice
from common.data.tokenizer import FromFile
from common.errors import UsageError
from common.launch.command_line import Within
from common.models.configs import TransformerConfig

from hybrid_data import LOOKED_AT, Shuffled
from hybrid_options import TrainOptions

SHARE = 0.15  # of the places of a sample
MASKED, RANDOM = 0.8, 0.1  # shares of the chosen places
NAMES = ("[MASK]", "<mask>")  # of the mask token in tokenizers of BERT and of RoBERTa


@dataclass
class MaskedOptions(TrainOptions, without=("generate", "prompt", "temperature")):
    """Options of a training run that predicts masked tokens."""

    model: str = "bert-small"
    """Name of a model in common/models/configs.py: bert-tiny, bert-small, bert-10m, bert-base, bert-large."""
    epsilon: Annotated[float, Within(1e-30, 1)] = 1e-8
    """AdamW's epsilon; smaller than the gradients of queries and keys, which are small at first."""
    mask_token: Annotated[int, Within(0, 2**31)] | None = None
    """Number of the mask token; default: that of the tokenizer's [MASK] or <mask>, else the vocabulary's last."""

    def model_config(self) -> TransformerConfig:
        """Return the model's shape; a --model has one token more than a tokenizer that has no mask token."""
        shape = super().model_config()
        more = self.tokenizer and not self.init and self.mask_token is None and self.named_mask is None
        return replace(shape, vocabulary=shape.vocabulary + 1) if more else shape

    @property
    def named_mask(self) -> int | None:
        """Number of the mask token in the tokenizer, if it has one."""
        found = map(self.coder.tokenizer.token_to_id, NAMES) if isinstance(self.coder, FromFile) else ()
        return next((number for number in found if number is not None), None)

    @property
    def mask(self) -> int:
        """Number of the mask token."""
        numbers = (self.mask_token, self.named_mask, self.model_config().vocabulary - 1)
        return next(number for number in numbers if number is not None)

    def check_model(self) -> None:
        """Check that the model sees tokens on both sides, and knows the mask token. Raises UsageError."""
        c = self.model_config()
        if c.causal:
            raise UsageError(
                f"{self.init or self.model} does not see later tokens, so it is none that fills in masked ones; "
                f"give bert-small, or train it with train_llama.py"
            )
        if self.mask >= c.vocabulary:
            raise UsageError(
                f"--mask-token {self.mask}: the model has tokens 0 to {c.vocabulary - 1}; give one of them"
            )


def hide(
    tokens_BS: Tensor, numbers_B: NDArray[np.int64], seed: int, name: str, mask: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return (tokens_BS with some of them hidden, targets_BS: the hidden tokens, -100 elsewhere).

    numbers_B: numbers of the samples. name: of the streams of random numbers. Random tokens are drawn from the
    vocabulary without the mask token.
    """
    S = tokens_BS.shape[1]
    index_BS = numbers_B[:, None] * S + np.arange(S)
    bits = {
        use: random.bits(seed, random.stream_of(f"{name}: {use}"), index_BS)
        for use in ("place", "kind", "token")
    }
    # the places with the smallest bits; no two are equal, as mixing is a bijection
    chosen_BS = bits["place"].argsort(1).argsort(1) < max(1, round(SHARE * S))
    kind_BS = (bits["kind"] >> np.uint64(11)) * 2.0**-53
    token_BS = (bits["token"] % np.uint64(vocabulary - 1)).astype(np.int64)
    token_BS += token_BS >= mask
    before_BS = tokens_BS.numpy()
    shown_BS = np.select([kind_BS < MASKED, kind_BS < MASKED + RANDOM], [mask, token_BS], before_BS)
    hidden_BS = np.where(chosen_BS, shown_BS, before_BS)
    return torch.from_numpy(hidden_BS), torch.from_numpy(np.where(chosen_BS, before_BS, PADDING))


class Masked(Shuffled):
    """This rank's part of every global batch, with hidden tokens; the targets are these tokens."""

    options: MaskedOptions

    def load(self) -> Text:
        """Load the text. Raises UsageError as `Shuffled` does, and if the text holds the mask token."""
        text, mask = super().load(), self.options.mask
        for part in (text.train, text.validation):
            if (part[slice(*rank_slice(len(part), self.group.rank, self.group.size))] == mask).any():
                raise UsageError(
                    f"{text.name} holds the token {mask}, which is to hide others; give another --mask-token"
                )
        self.vocabulary = self.options.model_config().vocabulary
        return text

    def hide(self, tokens_BS: Tensor, first: int, name: str) -> tuple[Tensor, Tensor]:
        """Hide tokens of the samples from number `first` on; return (tokens_BS, targets_BS)."""
        numbers_B, o = np.arange(first, first + len(tokens_BS)), self.options
        return hide(tokens_BS, numbers_B, o.seed, name, o.mask, self.vocabulary)

    def take(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return samples [lo, hi) of the step's global batch: (tokens_BS, targets_BS)."""
        return self.hide(super().take(step, lo, hi)[0], lo, f"masks of step {step}")

    def validation(self, first: int) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of a global batch of validation samples, as `Shuffled` does, with hidden tokens."""
        parts = []
        for (lo, _), (tokens_BS, next_BS) in zip(self.samples(), super().validation(first), strict=True):
            hidden_BS, targets_BS = self.hide(tokens_BS.cpu(), first + lo, "masks of validation")
            repeats_BS = next_BS.cpu() == PADDING
            targets_BS = targets_BS.masked_fill(repeats_BS, PADDING)
            parts.append((hidden_BS.to(self.device), targets_BS.to(self.device)))
        return parts

    def about(self) -> dict[str, object]:
        """Return the values that must agree for a resumed run to see the very next batch and its masks."""
        return super().about() | {"mask_token": self.options.mask}

    def most_frequent(self) -> float:
        """Return the share of the most frequent token: the accuracy of a model that always predicts it."""
        counts = np.bincount(np.asarray(self.text.train[:LOOKED_AT]))
        return float(counts.max() / counts.sum())
