"""Train a byte-level BPE, GPT-2's kind of tokenizer, on any text; the same text gives the same file.

    python train_tokenizer.py                                                tokenizer.json from Python's sources
    python train_tokenizer.py --data book.txt --vocabulary 4096 --out book.json
    python train_tokenizer.py --data book.txt --tokens book.npy              also the text's tokens, for --data

It begins with the 256 bytes and joins the most frequent pair of neighbours again and again. Only the nine tenths of
the text that a run trains on count, so that the validation loss is one of unseen text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from common.comm import Group
from common.data.text import load_text
from common.data.tokenizer import FromFile, chunks_of, train
from common.errors import UsageError
from common.launch.command_line import Checked, Within, check_folder, parse
from common.launch.program import run_program

from hybrid_data import encode


@dataclass
class Options(Checked):
    """Options of a tokenizer's training."""

    data: Path | None = None
    """Text: a file or a folder; default: Python's standard library."""
    vocabulary: Annotated[int, Within(257, 2**20)] = 2048
    """Number of tokens: 256 bytes, one that ends a text, and as many joined pairs as are missing."""
    out: Path = Path("tokenizer.json")
    """File for the tokenizer."""
    tokens: Path | None = None
    """File (.npy) for the tokens of the text, so that a long text is encoded once for all runs."""


def main(o: Options) -> int:
    """Write the files; return 0. Raises UsageError."""
    if o.tokens and o.tokens.suffix != ".npy":
        raise UsageError(f"--tokens {o.tokens}: give a file whose name ends in .npy")
    for name, file in (("out", o.out), ("tokens", o.tokens)):
        if file is not None:
            check_folder(name, file, file.absolute().parent)
    text = load_text(o.data)
    content = train(text.train.tobytes(), o.vocabulary)
    try:
        o.out.write_text(content)
        tokenizer = FromFile(o.out)
        if o.tokens:
            found = encode(text, tokenizer, Group.alone())
            kind = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.uint32
            np.save(o.tokens, np.concatenate([found.train, found.validation]).astype(kind))
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from None
    unseen = text.validation.tobytes()
    count = sum(map(len, tokenizer.encode_chunks([*chunks_of(unseen)])))
    print(
        f"{o.out}: {tokenizer.vocabulary} tokens, {len(unseen) / count:.2f} bytes each in unseen text of {text.name}"
    )
    return 0


if __name__ == "__main__":
    run_program(lambda: main(parse(Options, __doc__)))
