"""Validation loss and generated text, the same on every mesh: forward passes alone.

Neither keeps activations, and the stages run in their order, without a schedule. The loss is, as in training, a sum
over tokens divided by their number: samples are split over dp and ep, and tokens over sp.

    tokens  [ d  e  f  _  f  o  o  .  .  .  . ]      a window of S tokens, padded with zeros: attention is causal,
                             ^                       so padding does not change earlier logits
                             logits here, one more token, again

Each token costs a forward pass over the window: there is no key-value cache. Logits at one position lie on
one rank along sp, in shards along tp, and on the last stage along pp. That stage sums them over sp (zeros
elsewhere) and gathers them over tp, and one broadcast sends the chosen tokens to all ranks. The draw is a
function of (seed, step, sample, position), without a generator's state: the same on every mesh, up to a draw
that falls within rounding of the border between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from common import comm, random
from common.comm import sizes_of

from hybrid_data import Shuffled
from hybrid_model import Hybrid
from pp_pipeline import Loss


@contextmanager
def evaluating(hybrid: Hybrid) -> Iterator[None]:
    """Switch dropout off inside the block."""
    hybrid.model.eval()
    try:
        yield
    finally:
        hybrid.model.train()


def validation_loss(hybrid: Hybrid, batches: Shuffled, loss: Loss | None = None) -> float:
    """Return the loss in nats per token over the samples of an evaluation, the same on all ranks.

    loss: function of the last stage's logits and the targets, by default the loss of training.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=batches.device)  # of losses, and of targets
    with evaluating(hybrid):
        for first in range(0, batches.evaluated, batches.options.batch):
            parts = [hybrid.split(*part) for part in batches.validation(first)]
            sums[0] += hybrid.pipe.evaluate(parts, loss)
            sums[1] += sum((targets_Bs != -100).sum() for *_, targets_Bs in parts)
    comm.all_reduce(sums, hybrid.tokens)
    return float(sums[0] / sums[1])


def generate(
    hybrid: Hybrid,
    prompt: list[int],
    count: int,
    window: int,
    seed: int,
    step: int,
    temperature: float,
    samples: int = 1,
) -> list[list[int]]:
    """Return `samples` continuations of `prompt`, `count` tokens each, the same on all ranks."""
    device = next(hybrid.model.parameters()).device
    last_stage = hybrid.pipe.schedule.owner[-1] * (
        hybrid.mesh.world.size // hybrid.mesh.shape["pp"]
    )  # its first rank
    written_BN = torch.tensor([prompt] * samples, device=device)
    with evaluating(hybrid):
        for at in range(len(prompt), len(prompt) + count):
            seen_BN = written_BN[:, -window:]
            tokens_BS = torch.nn.functional.pad(seen_BN, (0, window - seen_BN.shape[1]))
            logits_BV = last_logits(hybrid, tokens_BS, seen_BN.shape[1] - 1)
            uniform_B = random.uniform(seed, random.stream_of(f"text {step}"), np.arange(samples) << 32 | at)
            next_B = choose(logits_BV, torch.from_numpy(uniform_B), temperature).to(device)
            comm.broadcast(next_B, hybrid.mesh.world, last_stage)
            written_BN = torch.cat([written_BN, next_B[:, None]], 1)
    return [row[len(prompt) :] for row in written_BN.tolist()]


def last_logits(hybrid: Hybrid, tokens_BS: Tensor, at: int) -> Tensor:
    """Return the logits after token `at`, [B, V]: whole on the ranks of the last stage, zeros elsewhere."""
    mesh, vocabulary = hybrid.mesh, hybrid.config.vocabulary
    part = hybrid.split(tokens_BS, tokens_BS)
    positions_s = part[1] if len(part) == 3 else torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    mine = sizes_of(vocabulary, mesh.shape["tp"])[mesh.at["tp"]]
    logits_Bv = torch.zeros(len(tokens_BS), mine, dtype=torch.float64, device=tokens_BS.device)

    def keep(logits_Bsv: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        logits_Bv.add_(logits_Bsv[:, positions_s == at].sum(1))
        return logits_Bv.new_zeros(()), logits_Bv.new_zeros(())

    hybrid.pipe.evaluate([part], keep)
    comm.all_reduce(logits_Bv, mesh.group("sp"))
    return comm.all_gather(logits_Bv, mesh.group("tp"), -1, sizes_of(vocabulary, mesh.shape["tp"]))


def choose(logits_BV: Tensor, uniform_B: Tensor, temperature: float) -> Tensor:
    """Choose a token per row: inverse cumulative distribution at uniform_B; temperature 0: the likeliest."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    ends_BV = (logits_BV / temperature).softmax(-1).cumsum(-1)
    found_B1 = torch.searchsorted(ends_BV, uniform_B[:, None].to(ends_BV) * ends_BV[:, -1:], right=True)
    return found_B1[:, 0].clamp(max=logits_BV.shape[1] - 1)
