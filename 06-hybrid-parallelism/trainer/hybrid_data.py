"""Training data: samples of a text or of a token file, in an order that needs no saved state.

    positions  0  1  2  3 | 4  5  6  7 | 8 ...       step t takes positions t B to (t+1) B of the endless order
    ranks      0  0  1  1 | 0  0  1  1 |             places along dp and ep a range each, on any mesh

A run that resumes at step t, on any mesh, therefore sees the very next batch, without any saved state of the
data. The order is shuffled anew in every epoch (common/data/sampler.py).

Token files are mapped into memory, so they may be larger than the memory: NumPy's .npy, or the bare numbers
as nanoGPT and Megatron-LM write them. With --tokenizer a text is cut into chunks, all ranks encode a part of them, and
every rank gets all tokens: the chunks do not depend on the number of ranks, so neither do the tokens.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common import comm
from common.comm import Group
from common.data.sampler import samples_at
from common.data.text import Text, Tokens, lm_samples, load_text, rank_slice
from common.data.tokenizer import FromFile, chunks_of
from common.errors import UsageError
from common.lesson.training import Batches

from hybrid_options import TrainOptions

LOOKED_AT = 1 << 24  # tokens from which the entropy is computed: enough for its third digit
SUMMED = 64  # parts of each text, which the ranks hash in parallel


class Shuffled(Batches):
    """This rank's part of every global batch: whole samples of the text in the endless shuffled order."""

    options: TrainOptions

    def __init__(
        self, o: TrainOptions, group: Group, device: torch.device, world: Group | None = None
    ) -> None:
        self.world = world or group  # ranks that encode the text
        super().__init__(o, group, device)

    def load(self) -> Text:
        """Load the text. Raises UsageError if it has no sample, or tokens outside the model's vocabulary."""
        o, vocabulary = self.options, self.options.model_config().vocabulary
        text = load_tokens(o.data, o.tokens)
        if isinstance(o.coder, FromFile) and is_text(o.data, o.tokens):
            text = encode(text, o.coder, self.world)
        for part in (text.train, text.validation):
            if len(part) <= o.sequence:
                longest = len(text.validation) - 1
                hint = f"--sequence {longest} or less would do" if longest > 0 else "give a longer one"
                raise UsageError(
                    f"{text.name} has {len(text.train)} tokens to train on and {len(text.validation)} for validation, "
                    f"no sample of {o.sequence}; {hint}"
                )
            # each rank checks only its part, since the file may be long
            mine = part[slice(*rank_slice(len(part), self.group.rank, self.group.size))]
            least, largest = int(mine.min(initial=0)), int(mine.max(initial=0))
            if least < 0 or largest >= vocabulary:
                raise UsageError(
                    f"{text.name} holds tokens {least} to {largest}, but the model has a vocabulary of {vocabulary}; "
                    f"is --tokens {o.tokens} right?"
                )
        self.held = (len(text.train) - 1) // o.sequence
        return text

    def take(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return samples [lo, hi) of the step's global batch: (tokens_BS, targets_BS)."""
        o, first = self.options, step * self.options.batch
        return lm_samples(self.text.train, samples_at(o.seed, self.held, first + lo, first + hi), o.sequence)

    def mine(self, step: int) -> tuple[Tensor, Tensor, int]:
        """Return this rank's samples of the step, (tokens_BS, targets_BS), and the number of the first of them."""
        lo, hi = rank_slice(self.options.batch, self.group.rank, self.group.size)
        tokens_BS, targets_BS = self.take(step, lo, hi)
        return tokens_BS.to(self.device), targets_BS.to(self.device), lo

    @property
    def evaluated(self) -> int:
        """Number of samples in an evaluation: `--evaluation`, or fewer if the validation text is short."""
        return min(self.options.evaluation, (len(self.text.validation) - 1) // self.options.sequence)

    def validation(self, first: int) -> list[tuple[Tensor, Tensor]]:
        """Return the micro-batches of a global batch of validation samples, from sample number `first` on.

        The `evaluated` samples are spread evenly over the validation text. Beyond the last one there are
        repeats, whose targets are ignored (-100).
        """
        o, count, parts = self.options, self.evaluated, []
        held = (len(self.text.validation) - 1) // o.sequence
        for lo, hi in self.samples():
            number = np.arange(first + lo, first + hi)
            at = np.minimum(number, count - 1) * held // count
            tokens_BS, targets_BS = lm_samples(self.text.validation, at, o.sequence)
            targets_BS = targets_BS.masked_fill(torch.from_numpy(number >= count)[:, None], -100)
            parts.append((tokens_BS.to(self.device), targets_BS.to(self.device)))
        return parts

    def about(self) -> dict[str, object]:
        """Return the values that must agree for a resumed run to see the very next batch."""
        o = self.options
        return {
            "seed": o.seed,
            "batch": o.batch,
            "sequence": o.sequence,
            "data": self.text.name,
            "data_tokens": len(self.text.train) + len(self.text.validation),
            "data_sha256": self.sha256,
            **(
                {"tokenizer": o.coder.name} if isinstance(o.coder, FromFile) else {}
            ),  # programs in C++ have bytes
        }

    @cached_property
    def sha256(self) -> str:
        """Hash of the hashes of the text's parts, computed in parallel by the ranks. All ranks call it."""
        group = self.group
        parts = [
            part[slice(*rank_slice(len(part), i, SUMMED))]
            for part in (self.text.train, self.text.validation)
            for i in range(SUMMED)
        ]
        mine = [hashlib.sha256(part.data).hexdigest() for part in parts[group.rank :: group.size]]
        by_rank = comm.everyones(mine, group)
        in_order = [by_rank[i % group.size][i // group.size] for i in range(len(parts))]
        return hashlib.sha256("".join(in_order).encode()).hexdigest()


def is_text(data: Path | None, kind: str) -> bool:
    """Return True if the data are text, not token numbers."""
    return kind == "bytes" and (data is None or data.suffix != ".npy")


def load_tokens(data: Path | None, kind: str) -> Text:
    """Load text as bytes, or a file of tokens. Raises UsageError if it cannot be read."""
    if data is None and kind != "bytes":
        raise UsageError(f"--tokens {kind} says how to read a file; give it as --data")
    if data is None or is_text(data, kind):
        return load_text(data)
    try:
        if data.suffix == ".npy":
            tokens: Tokens = np.load(data, mmap_mode="r")
        else:
            tokens = np.memmap(data, np.dtype(kind).newbyteorder("<"), "r")
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"cannot read --data {data} as token numbers: {error}") from None
    if not isinstance(tokens, np.ndarray):
        raise UsageError(f"--data {data} is an archive of arrays; give a file of one")
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise UsageError(
            f"--data {data} holds {tokens.dtype} of shape {list(tokens.shape)}; token numbers in a row are needed"
        )
    kept = len(tokens) * 9 // 10
    return Text(tokens[:kept], tokens[kept:], data.name)


def encode(text: Text, tokenizer: FromFile, world: Group) -> Text:
    """Return the tokens of a text of bytes; each rank encodes a part. All ranks call it."""
    parts = [[*chunks_of(part.tobytes())] for part in (text.train, text.validation)]
    chunks = parts[0] + parts[1]
    by_rank = comm.everyones(tokenizer.encode_chunks(chunks[world.rank :: world.size]), world)
    in_order = [by_rank[i % world.size][i // world.size] for i in range(len(chunks))]
    train, validation = (
        np.concatenate(found) for found in (in_order[: len(parts[0])], in_order[len(parts[0]) :])
    )
    length = (len(text.train) + len(text.validation)) / max(1, len(train) + len(validation))
    return Text(train, validation, text.name, length)


def unigram_entropy(text: Text) -> float:
    """Return the entropy of the token frequencies in nats per token: the loss of a model of these alone."""
    counts = np.bincount(np.asarray(text.train[:LOOKED_AT]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
