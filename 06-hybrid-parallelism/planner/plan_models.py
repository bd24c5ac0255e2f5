"""Models to plan for: names of real ones, this course's own, and config.json of Hugging Face.

    model("llama3-70b"), model("gpt3-175b"), model("llama-tiny"), model("folder/config.json")

A model is a TransformerConfig. DeepSeek's have two things more: latent attention, and a dense MLP in the first layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UsageError
from common.models.configs import CONFIGS, TransformerConfig, gpt2, llama, mixtral


@dataclass(frozen=True)
class LatentConfig(TransformerConfig):
    """Shape of a DeepSeek model (DeepSeek-V2, arXiv:2405.04434): attention through narrow, shared projections."""

    query_rank: int = 1536
    key_rank: int = 512
    key_width: int = 128
    """Numbers of a key that carry no position, per head."""
    rotary_width: int = 64
    """Numbers of a key that carry the position, the same for all heads."""
    value_width: int = 128
    dense_layers: int = 0
    """First layers, whose MLP is dense."""
    dense_width: int = 0
    """Inner width of that MLP."""


@dataclass(frozen=True)
class Projection:
    """A weight [columns, inner] of attention; split: over tp."""

    inner: int
    columns: int
    split: bool = True


def projections(c: TransformerConfig) -> list[Projection]:
    """Return the weights before the product of queries and keys."""
    if isinstance(c, LatentConfig):
        H = c.heads
        return [
            Projection(c.width, c.query_rank, False),
            Projection(c.query_rank, H * (c.key_width + c.rotary_width)),
            Projection(c.width, c.key_rank + c.rotary_width, False),
            Projection(c.key_rank, H * (c.key_width + c.value_width)),
        ]
    return [Projection(c.width, (c.heads + 2 * c.kv_heads) * c.head_width)]


def head_widths(c: TransformerConfig) -> tuple[int, int]:
    """Return the numbers of a head's key and of its value."""
    if isinstance(c, LatentConfig):
        return c.key_width + c.rotary_width, c.value_width
    return c.head_width, c.head_width


def layer_shapes(c: TransformerConfig) -> list[TransformerConfig]:
    """Return the shape of each layer: the model's own, but for DeepSeek's first layers."""
    if not isinstance(c, LatentConfig) or not c.dense_layers:
        return [c] * c.layers
    dense = replace(c, experts=0, shared_experts=0, mlp_width=c.dense_width)
    return [*[dense] * c.dense_layers, *[c] * (c.layers - c.dense_layers)]


def deepseek(
    layers: int,
    width: int,
    dense_width: int,
    expert_width: int,
    experts: int,
    per_token: int,
    shared: int,
    words: int,
    dense: int,
) -> LatentConfig:
    """Return a DeepSeek model, which has 128 heads."""
    return LatentConfig(
        *(layers, width, 128, 128, expert_width, 4096, words),
        norm="rmsnorm",
        positions="rotary",
        mlp="swiglu",
        bias=False,
        tied=False,
        experts=experts,
        experts_per_token=per_token,
        shared_experts=shared,
        dense_layers=dense,
        dense_width=dense_width,
    )


MODELS: dict[str, TransformerConfig] = {
    "gpt3-175b": gpt2(96, 12288, heads=96, sequence=2048, vocabulary=51200),
    "llama-7b": llama(32, 4096, heads=32, kv_heads=32, mlp_width=11008, sequence=4096, vocabulary=32000),
    "llama-13b": llama(40, 5120, heads=40, kv_heads=40, mlp_width=13824, sequence=4096, vocabulary=32000),
    "llama2-70b": llama(80, 8192, heads=64, kv_heads=8, mlp_width=28672, sequence=4096, vocabulary=32000),
    "llama3-8b": llama(32, 4096, heads=32, kv_heads=8, mlp_width=14336, sequence=8192, vocabulary=128256),
    "llama3-70b": llama(80, 8192, heads=64, kv_heads=8, mlp_width=28672, sequence=8192, vocabulary=128256),
    "llama3-405b": llama(
        126, 16384, heads=128, kv_heads=8, mlp_width=53248, sequence=8192, vocabulary=128256
    ),
    "mixtral-8x22b": mixtral(
        8, layers=56, width=6144, heads=48, kv_heads=8, mlp_width=16384, sequence=65536, vocabulary=32768
    ),
    "deepseek-v2": deepseek(60, 5120, 12288, 1536, experts=160, per_token=6, shared=2, words=102400, dense=1),
    "deepseek-v3": deepseek(61, 7168, 18432, 2048, experts=256, per_token=8, shared=1, words=129280, dense=3),
    **CONFIGS,
}

MOST_LAYERS = 10**4
KINDS = (
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
)  # whose shapes are known; the last ones are a LLaMA's


def model(name: str) -> TransformerConfig:
    """Return the model of that name, or of a config.json. Raises UsageError if there is none, or it is unreadable."""
    if name in MODELS:
        return MODELS[name]
    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if file.suffix != ".json":
        raise UsageError(f"--model {name}: choose one of {', '.join(MODELS)}, or give a config.json")
    return from_huggingface(file)


def from_huggingface(file: Path) -> TransformerConfig:
    """Return the shape that a config.json of Hugging Face describes.

    Raises UsageError if it cannot be read, describes a kind of model that the planner does not know, or lacks a size.
    """
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    kind = told.get("model_type", "llama") if isinstance(told, dict) else None
    if kind not in KINDS:
        raise UsageError(f"{file}: model_type {kind!r} is unknown; the planner knows {', '.join(KINDS)}")

    def size(key: str, default: object = None, most: int = 2**31) -> int:
        value = told.get(key) or default
        if value is None:
            raise UsageError(f"{file} lacks {key}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise UsageError(f"{file}: {key} is {value!r:.40}; give a whole number from 1 to {most}")
        return value

    if kind == "gpt2":
        layers, width, heads = size("n_layer", most=MOST_LAYERS), size("n_embd"), size("n_head")
        return gpt2(layers, width, heads, size("n_positions"), size("vocab_size"))
    layers, width, heads = (
        size("num_hidden_layers", most=MOST_LAYERS),
        size("hidden_size"),
        size("num_attention_heads"),
    )
    if (own := size("head_dim", width // heads)) != width // heads:
        raise UsageError(
            f"{file}: head_dim is {own}; the planner knows heads of hidden_size / heads, {width // heads}"
        )
    found = llama(
        *(layers, width, heads, size("num_key_value_heads", heads), size("intermediate_size")),
        *(size("max_position_embeddings"), size("vocab_size")),
    )
    if kind == "mixtral":
        experts, each = size("num_local_experts", 8), size("num_experts_per_tok", 2)
        found = replace(found, experts=experts, experts_per_token=each)
    return replace(found, tied=told.get("tie_word_embeddings") is True)
