"""Tokenizers: text to token numbers and back, as bytes or by a tokenizer.json of Hugging Face's `tokenizers`.

    tokenizer = load_tokenizer(Path("tokenizer.json"))     # None: bytes, tokens 0 to 255
    tokens = tokenizer.encode("é = 1")
    assert tokenizer.decode(tokens) == "é = 1"

    stream = Stream(tokenizer)                             # of a model that writes one token after the other
    for token in tokens:
        print(stream.add(token), end="")                   # "" until the character is complete
    print(stream.rest())

A byte-level BPE writes any text, because its first tokens are the 256 bytes: a character that is not ASCII may take
several tokens. `train` makes such a tokenizer from a text, without a download.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from common.errors import UsageError

END = "<|endoftext|>"  # GPT-2's name
ENDS = (END, "<|end_of_text|>", "<|eot_id|>", "</s>")  # of GPT-2, LLaMA 3 and LLaMA 2
BYTES = 256
CHUNK = 1 << 16  # characters of a text that are encoded at once
HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are not whole characters


class Bytes:
    """UTF-8: each byte is a token, and none ends a text."""

    vocabulary = BYTES
    end: int | None = None
    name = "bytes"

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the bytes of a text, and of a command line that is not UTF-8 those that were given."""
        return list(text.encode(errors="surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return bytes as text; tokens of another vocabulary as their numbers."""
        if max(tokens, default=0) < BYTES:
            return bytes(tokens).decode(errors="replace")
        return " ".join(map(str, tokens))


class FromFile:
    """Tokenizer of a tokenizer.json. Raises UsageError if the file cannot be read or is not one.

    vocabulary: its tokens are 0 to vocabulary - 1. end: the token that ends a text, if there is one. content: the file.
    name: its hash, which differs between tokenizers.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            if file.exists() and not file.is_file():
                raise UsageError(
                    f"cannot read the tokenizer {file}: Not a regular file"
                )  # a device may never end
            self.content = file.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the tokenizer {file}: {error.strerror}") from None
        try:
            self.tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
        except Exception as error:  # the library raises no narrower class
            reason = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"{file} is not a tokenizer.json of Hugging Face's tokenizers: {reason}"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        numbers = self.tokenizer.get_vocab(with_added_tokens=True)
        if not numbers:
            raise UsageError(f"the tokenizer {file} has no tokens")
        self.vocabulary = max(numbers.values()) + 1  # numbers may have gaps
        self.end = next((numbers[name] for name in ENDS if name in numbers), None)
        self.name = hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of a text; `special`: with those that the file puts around a prompt.

        Bytes of a command line that are not UTF-8 become replacement characters.
        """
        clean = text.encode(errors="surrogateescape").decode(errors="replace")
        return list(self.tokenizer.encode(clean, add_special_tokens=special).ids)

    def encode_chunks(self, chunks: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the tokens of each chunk of a long text."""
        found = self.tokenizer.encode_batch_fast(list(chunks), add_special_tokens=False)
        return [np.array(chunk.ids, np.uint32) for chunk in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones by their names; a number that is no token becomes "<number>"."""
        parts = itertools.groupby(tokens, lambda token: self.tokenizer.id_to_token(token) is not None)
        return "".join(
            self.tokenizer.decode(list(part), skip_special_tokens=False)
            if known
            else "".join(f"<{token}>" for token in part)
            for known, part in parts
        )


Tokenizer = Bytes | FromFile


def load_tokenizer(file: Path | None) -> Tokenizer:
    """Return the tokenizer of a file, or bytes. Raises UsageError if it cannot be read."""
    return FromFile(file) if file else Bytes()


class Stream:
    """Text of tokens that come one after the other, without halves of characters.

    Only tokens since the last complete character but one are decoded again, so a token costs the same at any length.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.shown: list[int] = []
        self.held: list[int] = []

    def add(self, token: int) -> str:
        """Return the text that is complete with this token; "" if a character is not yet."""
        self.held.append(token)
        text = self._new()
        if text.endswith(HALF):
            return ""
        self.shown, self.held = self.held, []
        return text

    def rest(self) -> str:
        """Return the text of the tokens whose character was never completed."""
        text, self.held = self._new(), []
        return text

    def _new(self) -> str:
        """Return the text of `held`, decoded after `shown`: some decoders drop the space before a first word."""
        before = self.tokenizer.decode(self.shown)
        return self.tokenizer.decode(self.shown + self.held)[len(before) :]


def chunks_of(content: bytes) -> Iterator[str]:
    """Yield a text in parts that each end with a line where possible; bytes that are not UTF-8 are replaced."""
    text, lo = content.decode(errors="replace"), 0
    while lo < len(text):
        hi = text.find("\n", lo + CHUNK - 1) + 1 or len(text)
        yield text[lo:hi]
        lo = hi


def train(content: bytes, vocabulary: int) -> str:
    """Return the content of a tokenizer.json: a byte-level BPE trained on a text; its token 0 ends a text.

    Raises UsageError if the text has too few different words for the vocabulary.
    """
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(chunks_of(content), trainer)
    if (found := tokenizer.get_vocab_size()) != vocabulary:
        raise UsageError(
            f"--vocabulary {vocabulary}: this text has only {found} tokens; give at most {found}"
        )
    return str(tokenizer.to_str(pretty=True)) + "\n"
