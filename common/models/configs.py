"""Shapes of Transformers, by name: GPT-2, LLaMA, both with experts (Switch, Mixtral), and BERT, from tiny to real.

    config("gpt2-10m"), gpt2(layers=6, width=384, heads=6, sequence=256)

`experts` above 0 makes every MLP a mixture of that many experts, each `mlp_width` wide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from common.errors import UsageError


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a model. Raises UsageError if the heads do not divide the width or one another."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    sequence: int
    """Longest sequence, in tokens."""
    vocabulary: int = 256
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    epsilon: float = 1e-5
    positions: Literal["learned", "rotary"] = "learned"
    rotary_base: float = 10000.0
    post_norm: bool = False
    """True: a norm after each sum, of the embeddings and of the residual stream; False: before each half of a layer."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    gelu: Literal["tanh", "none"] = "tanh"
    """Approximation of GELU, by torch's name for it; none: x times the normal distribution function at x."""
    bias: bool = True
    tied: bool = True
    """True if the head's matrix is the embedding."""
    masked_head: bool = False
    """True: the head has a dense layer and GELU before its norm, and a bias after its matrix."""
    token_types: int = 0
    """Number of token types, each with an embedding; 0 means none."""
    causal: bool = True
    dropout: float = 0.0
    """Share of numbers that training sets to zero: of the embeddings, of the attention weights, and of the
    output of each half of a layer. GPT-2 trained with 0.1, LLaMA with none."""
    experts: int = 0
    """Number of experts; 0 means a dense MLP."""
    experts_per_token: int = 2
    shared_experts: int = 0
    """Number of experts that process every token; they form one MLP, as many times as wide."""
    router: Literal["softmax", "renormalised", "sigmoid"] = "renormalised"
    """Formula of the expert choices and weights from the scores: see the table in moe.py."""
    capacity_factor: float | None = None
    """Tokens that an expert takes per sequence, as a multiple of an even share; None means no limit."""

    def __post_init__(self) -> None:
        for size in ("layers", "width", "heads", "kv_heads", "mlp_width", "sequence", "vocabulary"):
            if getattr(self, size) < 1:
                raise UsageError(f"a Transformer needs {size} of at least 1, not {getattr(self, size)}")
        if self.token_types < 0:
            raise UsageError(f"{self.token_types} token types: give at least 0")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout {self.dropout:g}: a share of at least 0 and below 1, such as 0.1")
        if self.width % self.heads:
            below = self.width // self.heads * self.heads
            fits = " or ".join(str(w) for w in (below, below + self.heads) if w)
            raise UsageError(f"width {self.width} does not divide into {self.heads} heads; {fits} would")
        if self.heads % self.kv_heads:
            fits = ", ".join(str(g) for g in range(1, self.heads + 1) if self.heads % g == 0)
            raise UsageError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads; {fits} would do"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise UsageError(f"rotary positions need an even width per head, not {self.head_width}")
        if min(self.experts, self.shared_experts) < 0:
            raise UsageError(f"{self.experts} experts, {self.shared_experts} shared ones: give at least 0")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise UsageError(
                f"a token cannot choose {self.experts_per_token} of {self.experts} experts; "
                f"1 to {self.experts} would do"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < float("inf"):
            raise UsageError(f"capacity factor {self.capacity_factor:g}: give one above 0, such as 1.25")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def gpt2(layers: int, width: int, heads: int, sequence: int, vocabulary: int = 256) -> TransformerConfig:
    """GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019)."""
    return TransformerConfig(layers, width, heads, heads, 4 * width, sequence, vocabulary)


def bert(layers: int, width: int, heads: int, sequence: int, vocabulary: int = 257) -> TransformerConfig:
    """BERT (Devlin et al., arXiv:1810.04805) with the head for masked tokens, without that for the next sentence.

    The default vocabulary is the 256 bytes and the mask token, 256.
    """
    plain = replace(gpt2(layers, width, heads, sequence, vocabulary), epsilon=1e-12, causal=False)
    return replace(plain, post_norm=True, gelu="none", masked_head=True, token_types=2)


def gpt2_moe(experts: int, **shape: int) -> TransformerConfig:
    """GPT-2 with two experts per token, whose weights sum to one; no token is dropped."""
    return replace(gpt2(**shape), experts=experts)


def llama(
    layers: int, width: int, heads: int, kv_heads: int, mlp_width: int, sequence: int, vocabulary: int = 256
) -> TransformerConfig:
    """LLaMA (Touvron et al., 2023), with the grouped-query attention of LLaMA 2."""
    sizes = (layers, width, heads, kv_heads, mlp_width, sequence, vocabulary)
    return TransformerConfig(*sizes, norm="rmsnorm", positions="rotary", mlp="swiglu", bias=False, tied=False)


def switch(experts: int, **shape: int) -> TransformerConfig:
    """GPT-2 with experts in every layer, one per token (Fedus et al., Switch, arXiv:2101.03961)."""
    return replace(
        gpt2(**shape), experts=experts, experts_per_token=1, router="softmax", capacity_factor=1.25
    )


def mixtral(experts: int, **shape: int) -> TransformerConfig:
    """LLaMA with two experts per token (Jiang et al., "Mixtral of experts", arXiv:2401.04088, table 1)."""
    return replace(llama(**shape), experts=experts, rotary_base=1e6)


CONFIGS = {
    "gpt2-tiny": gpt2(layers=2, width=64, heads=4, sequence=64),
    "gpt2-deep": gpt2(layers=16, width=32, heads=2, sequence=64),
    "gpt2-10m": gpt2(layers=6, width=384, heads=6, sequence=256),
    "gpt2": gpt2(layers=12, width=768, heads=12, sequence=1024, vocabulary=50257),
    "gpt2-medium": gpt2(layers=24, width=1024, heads=16, sequence=1024, vocabulary=50257),
    "gpt2-large": gpt2(layers=36, width=1280, heads=20, sequence=1024, vocabulary=50257),
    "gpt2-xl": gpt2(layers=48, width=1600, heads=25, sequence=1024, vocabulary=50257),
    "bert-tiny": bert(layers=2, width=64, heads=4, sequence=64),
    "bert-small": bert(layers=4, width=128, heads=4, sequence=128),
    "bert-10m": bert(layers=6, width=384, heads=6, sequence=256),
    "bert-base": bert(layers=12, width=768, heads=12, sequence=512, vocabulary=30522),
    "bert-large": bert(layers=24, width=1024, heads=16, sequence=512, vocabulary=30522),
    "gpt2-moe-tiny": gpt2_moe(layers=2, width=64, heads=4, sequence=64, experts=8),
    "llama-tiny": llama(layers=2, width=64, heads=4, kv_heads=2, mlp_width=176, sequence=64),
    "llama-deep": llama(layers=16, width=32, heads=2, kv_heads=1, mlp_width=88, sequence=64),
    "llama-10m": llama(layers=6, width=384, heads=6, kv_heads=2, mlp_width=1024, sequence=256),
    "llama-13m": llama(layers=8, width=384, heads=8, kv_heads=4, mlp_width=1024, sequence=256),
    "llama-100m": llama(12, 768, heads=12, kv_heads=4, mlp_width=2048, sequence=1024, vocabulary=16000),
    "llama2-7b": llama(32, 4096, heads=32, kv_heads=32, mlp_width=11008, sequence=4096, vocabulary=32000),
    "switch-tiny": switch(layers=2, width=64, heads=4, sequence=64, experts=8),
    "mixtral-tiny": mixtral(layers=2, width=64, heads=4, kv_heads=2, mlp_width=88, sequence=64, experts=8),
    "mixtral-31m": mixtral(layers=6, width=384, heads=6, kv_heads=2, mlp_width=512, sequence=256, experts=8),
    "mixtral-8x7b": mixtral(
        8, layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, sequence=32768, vocabulary=32000
    ),
}


def config(name: str) -> TransformerConfig:
    """Return the configuration of that name. Raises UsageError if there is none."""
    if name not in CONFIGS:
        raise UsageError(f"model {name!r} is unknown; choose one of {', '.join(CONFIGS)}")
    return CONFIGS[name]
