"""Training run on masked tokens: the trainer, with batches of hidden tokens and an evaluation of its own."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from common import comm
from common.comm import sizes_of
from common.data.text import PADDING

from hybrid_data import unigram_entropy
from hybrid_evaluate import validation_loss
from hybrid_masked import Masked
from hybrid_model import Hybrid
from hybrid_trainer import Trainer


def validation_scores(hybrid: Hybrid, batches: Masked) -> tuple[float, float]:
    """Return (loss in nats per hidden token, share of the hidden tokens that the model predicts).

    Both are those of the samples of an evaluation, and the same on all ranks. The logits of hidden tokens are gathered
    over tp.
    """
    tp = hybrid.mesh.group("tp")
    sizes = sizes_of(hybrid.config.vocabulary, tp.size)
    counts = torch.zeros(
        2, dtype=torch.float64, device=batches.device
    )  # of right predictions, and of targets

    def loss(logits_Bsv: Tensor, targets_Bs: Tensor) -> tuple[Tensor, Tensor]:
        hidden_Bs = targets_Bs != PADDING
        logits_NV = comm.all_gather(logits_Bsv[hidden_Bs], tp, -1, sizes)
        counts[0] += (logits_NV.argmax(-1) == targets_Bs[hidden_Bs]).sum()
        counts[1] += hidden_Bs.sum()
        return hybrid.model.loss(logits_Bsv, targets_Bs)

    found = validation_loss(hybrid, batches, loss)
    comm.all_reduce(counts, hybrid.mesh.group("pp"))  # zeros on all stages but the last
    comm.all_reduce(counts, hybrid.tokens)
    return found, float(counts[0] / counts[1])


class Pretraining(Trainer):
    """Training run on masked tokens."""

    batches: Masked
    batches_of = Masked

    @cached_property
    def unigram(self) -> str:
        """Loss and accuracy of a model that knows the frequencies of the tokens alone, in words."""
        return f"unigram {unigram_entropy(self.batches.text):.4f}, {self.batches.most_frequent():.1%}"

    def validate(self) -> None:
        """Log the validation loss, and the share of hidden tokens that the model predicts."""
        loss, accuracy = validation_scores(self.hybrid, self.batches)
        said = f"validation loss {loss:.4f}, masked accuracy {accuracy:.1%}"
        self.log.say(f"{self.step:6d}  {said}   ({self.unigram})")
        self.log.record("evaluation", self.step, validation_loss=loss, masked_accuracy=accuracy)
