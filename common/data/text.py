"""Real text without a download: bytes are tokens, and a batch is a pure function of (seed, step, slice).

    text = load_text(None)                       # Python's own standard library; or any file or folder
    lo, hi = rank_slice(batch, rank, size)
    tokens_BS, targets_BS = lm_batch(text.train, seed, step, batch, sequence, lo, hi)

Sample b of step t starts at bits(seed, t, b) % (len(text) - length), wherever it is computed: every mesh sees
the same global batch, a resumed run continues at the very next one, and the C++ cuts the same samples.

Sample 0 of each language-model batch differs in two ways. Its last quarter is padding, targets of -100 that
do not count, so the ranks and the micro-batches have different numbers of targets in every configuration. And
the highest bit of its bytes is flipped: text is nearly all ASCII, and half of the vocabulary would never
occur.

    B samples of this slice  S sequence  K bytes of context  I = 8 K inputs
"""

from __future__ import annotations

import functools
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common import random
from common.errors import UsageError

Bytes = NDArray[np.uint8]
Tokens = NDArray[Any]  # uint8, uint16 or uint32
SMALLEST = 1024
PADDING = -100  # a target that the loss ignores


@dataclass(frozen=True)
class Text:
    """Tokens of a text: the first nine tenths are for training, the rest for validation."""

    train: Tokens
    validation: Tokens
    name: str
    bytes_per_token: float | None = None
    """Mean length of a token in bytes, if a tokenizer has cut the text."""


def _files(data: Path | None) -> list[Path]:
    """Return the files of the text in an order that is the same on every machine with the same files."""
    if data is None:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if data.is_file():
        return [data]
    if not data.is_dir():
        raise UsageError(f"no such file or folder: {data} (--data takes any text)")
    inside = {path.relative_to(data): path for path in data.rglob("*") if path.is_file()}
    shown = [place for place in inside if not any(part.startswith(".") for part in place.parts)]
    return [inside[place] for place in sorted(shown, key=Path.as_posix)]


def _content(data: Path | None) -> bytes:
    return b"".join(path.read_bytes() for path in _files(data))


_default_content = functools.cache(_content)  # read once per process: every version of a lesson asks for it


def load_text(data: Path | None = None) -> Text:
    """Return the bytes of a file or of a folder's files (hidden ones left out).

    The default is the file or folder named by the environment variable FIVED_TEXT, else Python's standard library.
    Raises UsageError when the path does not exist, cannot be read or holds less than 1024 bytes.
    """
    read = _content if data else _default_content
    if data is None and (chosen := os.environ.get("FIVED_TEXT")):
        data = Path(chosen)
    try:
        content = read(data)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
    name = "Python's standard library" if data is None else str(data)
    if len(content) < SMALLEST:
        raise UsageError(f"{name} holds {len(content)} bytes of text; at least {SMALLEST} are needed")
    everything = np.frombuffer(content, np.uint8)
    kept = len(content) * 9 // 10
    return Text(everything[:kept], everything[kept:], name if data is None else data.resolve().name)


def rank_slice(batch: int, rank: int, size: int) -> tuple[int, int]:
    """Return samples [lo, hi) of a global batch for rank `rank` of `size`; lengths differ by at most one."""
    return batch * rank // size, batch * (rank + 1) // size


def _windows(text: Bytes, seed: int, step: int, batch: int, length: int, lo: int, hi: int) -> Bytes:
    """Return samples [lo, hi) of the step's batch: `length` bytes and the next one, [hi - lo, length + 1]."""
    if not 0 <= lo <= hi <= batch:
        raise UsageError(f"samples {lo} to {hi} are not a part of a batch of {batch}")
    if not 1 <= length < len(text):
        raise UsageError(
            f"windows of {length} bytes do not fit a text of {len(text)}; 1 to {len(text) - 1} do"
        )
    starts = random.bits(seed, step, np.arange(lo, hi)) % np.uint64(len(text) - length)
    return text[starts.astype(np.int64)[:, None] + np.arange(length + 1)]


def lm_batch(
    text: Bytes, seed: int, step: int, batch: int, sequence: int, lo: int, hi: int
) -> tuple[Tensor, Tensor]:
    """Return samples [lo, hi) of a global batch: (tokens_BS, targets_BS), int64, B = hi - lo.

    Raises UsageError when the text is too short or the slice lies outside the batch.
    """
    windows = torch.from_numpy(_windows(text, seed, step, batch, sequence, lo, hi).astype(np.int64))
    if lo == 0 < hi:
        windows[0] ^= 128
    tokens_BS, targets_BS = (
        windows[:, :-1].contiguous(),
        windows[:, 1:].clone(),
    )  # views of one window would overlap
    if lo == 0 < hi:
        targets_BS[0, sequence - sequence // 4 :] = PADDING
    return tokens_BS, targets_BS


def lm_samples(text: Tokens, samples: NDArray[np.int64], sequence: int) -> tuple[Tensor, Tensor]:
    """Return samples of the text by number: (tokens_BS, targets_BS), int64, B = len(samples).

    Sample i predicts tokens i * S + 1 to (i + 1) * S, so every token but the first is a target in one sample.
    There are (len(text) - 1) // S of them. Raises UsageError for a sample that the text does not have.
    """
    count = (len(text) - 1) // sequence
    if len(samples) and not 0 <= samples.min() <= samples.max() < count:
        raise UsageError(
            f"a text of {len(text)} tokens has samples 0 to {count - 1} of {sequence} tokens, not {samples.max()}"
        )
    pieces = torch.from_numpy(text[samples[:, None] * sequence + np.arange(sequence + 1)].astype(np.int64))
    return pieces[:, :-1].contiguous(), pieces[:, 1:].clone()  # views of one piece would overlap


def mlp_batch(
    text: Bytes,
    seed: int,
    step: int,
    batch: int,
    context: int,
    lo: int,
    hi: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return samples [lo, hi) of a global batch for the MLP: (x_BI of ±1, targets_B int64), B = hi - lo.

    Input 8 i + j is bit j (0 the least significant) of context byte i (0 the oldest): +1 if set, else -1.
    Raises UsageError as `lm_batch` does.
    """
    windows = _windows(text, seed, step, batch, context, lo, hi)
    set_BI = np.unpackbits(windows[:, :-1], axis=1, bitorder="little")
    x_BI = torch.from_numpy(set_BI).to(dtype) * 2 - 1
    return x_BI, torch.from_numpy(windows[:, -1].astype(np.int64))
