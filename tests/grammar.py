"""Text of the tests: prose, code and tables by a seeded grammar, the same bytes on every machine.

    FIVED_TEXT=$(python tests/grammar.py 1) python file.py      # prints the path of the text of seed 1

Python promises that the numbers of `random.Random(seed).random()` never change; it promises this of no other method.
"""

from __future__ import annotations

import math
import os
import random
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "texts"
SIZE = 300_000  # bytes, at least
RULES = {
    "text": ["{function}", "{function}", "{table}", "{prose}{prose}"],
    "function": [
        'def {name}({word}, {word}={value}):\n    """{Sentence}"""\n{line}{line}{block}    return {term}\n\n\n',
        "class {Word}:\n    # {Sentence}\n    {word} = {value}\n    {word} = {value}\n\n\n",
    ],
    "block": ["{line}", "    for {word} in range({value}):\n    {line}    {line}", "    if {test}:\n    {line}"],
    "line": ["    {word} = {term}\n", "    {word}.{word}({term}, {term})\n", "    assert {test}, '{word} {word}'\n"],
    "test": ["{term} < {value}", "{word} is not None", "{word} == {term} and {word}"],
    "term": ["{word}", "{word}", "{value}", "{word}[{value}]", "{word} {sign} {value}", "{name}({word})", "{constant}"],
    "sign": [*"+-*/%&|^@~<>=!?;:,.$#"],
    "constant": ["{capital}{capital}", "{capital}{capital}_{capital}{capital}"],
    "capital": [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"],
    "accent": [*"àéîõüßñžλд中"],
    "name": ["{word}", "{word}_{word}"],
    "value": ["{digit}", "{digit}", "{digit}{digit}", "{digit}.{digit}e-{digit}", "0x{digit}F", "'{word}'"],
    "digit": [*"0123456789"],
    "table": ["{row}{row}{row}{row}{row}\n"],
    "row": ["| {word} | {digit}{digit}.{digit} % | {value} |\n"],
    "prose": ["{Sentence} {Sentence} {Sentence}\n{Sentence} {Sentence}\n\n"],
    "sentence": ["the {noun} {word} the {noun}.", "{word} the {noun}, and {word} {sentence}", "what {word} {noun}?"],
    "noun": ["{word}", "{word}", "{word} of the {word}", "{word} ({word})", "“{word}”", "{word} → {word}", "{odd}"],
    "odd": ["π{digit}", "{word}{accent}"],
}  # fmt: skip
STARTS = ["b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "t", "th", "v", "st"]
ENDS = ["a", "e", "i", "o", "u", "an", "er", "in"]


def text(seed: int) -> bytes:
    """Return the text of a seed, in UTF-8. Words follow a skewed distribution, as in a natural language."""
    draw = random.Random(seed).random

    def choose(among: list[str], skew: int = 1) -> str:
        return among[int(len(among) * math.prod(draw() for _ in range(skew)))]

    words = ["".join(choose(STARTS) + choose(ENDS) for _ in range(1 + i % 3)) for i in range(300)]

    def expand(match: re.Match[str]) -> str:
        symbol = match[1].lower()
        found = (
            choose(words, skew=2) if symbol == "word" else re.sub(r"{(\w+)}", expand, choose(RULES[symbol]))
        )
        return found if match[1] == symbol else found[0].upper() + found[1:]

    parts, size = [], 0
    while size < SIZE:
        parts.append(re.sub(r"{(\w+)}", expand, "{text}").encode())
        size += len(parts[-1])
    return b"".join(parts)


def file(seed: int) -> Path:
    """Return the path of the text of a seed, written on first use."""
    path, content = FOLDER / f"text-{seed}", text(seed)
    if not path.exists() or path.read_bytes() != content:
        FOLDER.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}-{os.getpid()}")
        new.write_bytes(content)
        new.replace(path)
    return path


if __name__ == "__main__":
    print(file(int(sys.argv[1])))
