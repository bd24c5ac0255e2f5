"""Text to tokens and back: by the checkpoint's tokenizer.json, or bytes if it has none; the tokens that end a text."""

from __future__ import annotations

import json
from pathlib import Path

from common.data.tokenizer import Tokenizer, load_tokenizer
from common.errors import UsageError

ENDS = ("generation_config.json", "config.json")


def tokenizer_of(checkpoint: Path | None) -> Tokenizer:
    """Return the tokenizer of a checkpoint, or that of bytes. Raises UsageError if its file cannot be read."""
    file = checkpoint / "tokenizer.json" if checkpoint else None
    return load_tokenizer(file if file and file.exists() else None)


def stop_tokens(checkpoint: Path | None) -> frozenset[int]:
    """Return the end-of-text tokens that a checkpoint names. Raises UsageError if they are no numbers."""
    for name in ENDS:
        if checkpoint and (file := checkpoint / name).exists():
            try:
                found = json.loads(file.read_text()).get("eos_token_id")
            except (OSError, ValueError, AttributeError) as error:
                raise UsageError(f"cannot read {file}: {error}") from None
            ends = found if isinstance(found, list) else [] if found is None else [found]
            if any(type(end) is not int for end in ends):
                raise UsageError(f"{file}: eos_token_id is {found!r}; give a number or a list of numbers")
            if ends:
                return frozenset(ends)
    return frozenset()
