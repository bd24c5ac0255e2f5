"""The options of a program that generates text, and where its requests come from.

--prompts "def f(" "class A"       a request each, with the command line's options
--file prompts.txt                 a request per line
--file requests.jsonl              a JSON object per line: {"prompt": "def ", "tokens": 20, "seed": 3}
neither                            lines of the terminal, or of a pipe, one after the other
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import torch

from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Checked, Ranks, Seed, Size, Within, fits
from common.launch.runtime import Runtime
from common.lesson.runner import DTYPES, LessonOptions
from common.models.configs import TransformerConfig, config
from common.models.huggingface import read_config, read_weights

from infer_engine import Engine

Factor = Annotated[float, Within(0, 1e6)]
TYPES = DTYPES | {"bfloat16": torch.bfloat16}


@dataclass
class Choice(Checked):
    """Options of a request; a line of a .jsonl file may have each of them."""

    tokens: Size | None = None
    """Most tokens to write for a prompt; default: 64, or what the prompt leaves of the model's longest sequence."""
    temperature: Factor = 0.8
    """Sampling temperature; 0 takes the likeliest token, 1 draws from the model's distribution."""
    top_k: Annotated[int, Within(0, 2**27)] = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: Annotated[float, Within(1e-9, 1)] = 1.0
    """Draw from the likeliest tokens whose probabilities reach this sum."""
    seed: Seed = 0
    """Seed of the draws, and of the weights without --checkpoint."""
    stop: tuple[Annotated[int, Within(0, 2**31)], ...] = ()
    """Numbers of tokens that end a text, beside those that the checkpoint names."""


@dataclass
class GenerateOptions(Choice, LessonOptions, without=("steps", "data", "plot", "check", "trace")):
    """Options of a program that generates text."""

    reads_input: ClassVar[bool] = True

    config: Path | None = None
    """TOML file with options; the command line overrides them."""
    checkpoint: Path | None = None
    """Folder with a LLaMA or Mixtral of Hugging Face: config.json, safetensors, perhaps tokenizer.json."""
    model: str = "llama-tiny"
    """Without --checkpoint: name of a model in common/models/configs.py, with its initial values."""
    pp: Ranks = 1
    """Ranks along pp: stages of layers."""
    tp: Ranks | None = None
    """Ranks along tp: heads, and shards of each matrix; default: all ranks that pp leaves."""
    prompts: tuple[str, ...] = ()
    """Prompts, one request each."""
    file: Path | None = None
    """File with a prompt per line; .jsonl: an object per line, with a prompt and options of its own."""
    most: Annotated[int, Within(1, 4096)] = 16
    """Requests that run at once."""
    budget: Size = 512
    """Most tokens of a forward pass; a longer prompt is computed in several passes."""
    blocks: Annotated[int, Within(1, 2**22)] = 256
    """Blocks of the cache, on each rank for its own layers and heads."""
    block: Annotated[int, Within(1, 2**16)] = 16
    """Tokens per block."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"  # type: ignore[assignment]
    """Type of weights, cache and products."""

    def shape(self) -> TransformerConfig:
        """Return the model's shape. Raises UsageError if it cannot be read."""
        return read_config(self.checkpoint) if self.checkpoint else config(self.model)

    def mesh(self, rt: Runtime) -> Mesh:
        """Return the mesh of all ranks. Raises UsageError if the axes' product is not their number."""
        tp = self.tp or max(1, rt.world_size // self.pp)
        return Mesh(rt.world, pp=self.pp, tp=tp, timeout=rt.timeout)

    def engine(self, rt: Runtime, mesh: Mesh) -> Engine:
        """Return this rank's engine. Raises UsageError if model, mesh and cache do not fit together."""
        shape = self.shape()
        whole = read_weights(self.checkpoint, shape) if self.checkpoint else None
        return Engine(
            shape,
            mesh,
            rt.device,
            TYPES[self.dtype],
            self.seed,
            whole,
            blocks=self.blocks,
            block=self.block,
            most=self.most,
            budget=self.budget,
        )


def read_file(file: Path, default: Choice) -> Iterator[tuple[str, Choice]]:
    """Yield the prompts of a file with their options; what a line does not say is as in `default`.

    Raises UsageError for a file that cannot be read, and for a line that is no request.
    """
    if file.exists() and not file.is_file():
        raise UsageError(f"cannot read --file {file}: not a regular file")  # each rank reads it
    try:
        lines = file.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --file {file}: {error}") from None
    known = {f.name: getattr(default, f.name) for f in fields(Choice)}
    hints = get_type_hints(Choice, include_extras=True) | {"prompt": str}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix.lower() != ".jsonl":
            yield line, Choice(**known)
            continue
        where = f"{file}, line {number}"
        try:
            said: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON: {error}") from None
        if not isinstance(said, dict) or "prompt" not in said:
            raise UsageError(
                f'{where}: give an object with a prompt, such as {{"prompt": "def ", "tokens": 20}}'
            )
        for name, value in said.items():
            if name not in hints:
                raise UsageError(f"{where}: {name!r} is unknown; choose from {', '.join(hints)}")
            if name == "stop":
                good = isinstance(value, list) and all(type(v) is int and 0 <= v <= 2**31 for v in value)
                said[name] = tuple(value) if good else value
            else:
                good = fits(value, hints[name])
            if not good:
                raise UsageError(f"{where}: {name} cannot be {value!r:.60}")
        prompt = said.pop("prompt")
        yield prompt, Choice(**known | said)
