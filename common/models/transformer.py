"""One plain Transformer for one device. Strategies import and change it; it imports no strategy.

    model = Transformer(config("gpt2-10m"))          # or "llama-tiny"; configs.py has the sizes
    logits_BSV = model(tokens_BS)
    loss_sum, targets = cross_entropy_sum(logits_BSV, targets_BS)

GPT-2, LLaMA and BERT are configurations of the same modules under the same names, so a strategy is written once. It may
change the model at these seams, and at no others:

    seam                                  without a strategy     who changes it
    a module, for one with the same map   Linear, Embedding      tp, by `replace_linears`; embed_tokens
    a module's input, output: torch hooks unchanged              tp: attention, mlp, both ends, dropout
    MatrixProduct.product                 F.linear               pp: weight gradients later than those of inputs
    Attention.attend                      softmax(q k^T) v       sp: keys and values of other ranks
    MoE.compute, in moe.py                its experts            ep: experts of other ranks
    Transformer.run_layer                 layer(x, positions)    checkpointing
    Transformer.loss                      cross_entropy_sum      tp: of logits split over the vocabulary
    Dropout.first_head, in dropout.py     0                      tp: the first of this rank's heads

`layer.attention` has q_proj, k_proj, v_proj and o_proj, `layer.mlp` up_proj, down_proj and, in SwiGLU, gate_proj, or
the experts of moe.py. The queries, keys and values of GPT-2 are three matrices here, where Hugging Face fuses them,
because three split by heads and one does not. Linear weights are [out, in]. `huggingface.py` holds the table between
these names and Hugging Face's; the numbers are equal.

Initial values are a function of (seed, parameter name, position): any part of the model has the same values
on whichever rank builds it. A tied head is not a parameter: it is the embedding, used twice.

    B batch  S sequence  D width  V vocabulary  H query heads  G key-value heads  K width of a head
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import random
from common.errors import UsageError
from common.models.configs import TransformerConfig, config
from common.models.dropout import Dropout
from common.models.moe import MoE

__all__ = ["Transformer", "TransformerConfig", "config", "cross_entropy_sum", "initialise"]


def angles(positions_S: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles: position * base^(-2k/K), negative for k, positive for k + K/2.

    width: K. `positions_S` may also be [B, S]; the results are [1, S, K] or [B, 1, S, K].
    """
    half = width // 2
    precise = torch.promote_types(dtype, torch.float32)  # bfloat16 cannot count beyond 256
    frequency_k = base ** (-torch.arange(half, dtype=precise, device=positions_S.device) / half)
    angle_Sk = (positions_S.to(precise)[..., None] * frequency_k).unsqueeze(-3)
    angle_SK = torch.cat((-angle_Sk, angle_Sk), dim=-1)
    return angle_SK.cos().to(dtype), angle_SK.sin().to(dtype)


def rotate(x_BHSK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with its rotary position embedding (Su et al., "RoFormer", 2021, arXiv:2104.09864)."""
    return x_BHSK * cos + x_BHSK.roll(x_BHSK.shape[-1] // 2, -1) * sin


def attend(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(K)) v; query head h reads key-value head h // (H / G). Returns [B, H, S, K]."""
    grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
    return F.scaled_dot_product_attention(q_BHSK, k_BGSK, v_BGSK, is_causal=causal, enable_gqa=grouped)


def attend_and_drop(
    q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool, drop: Callable[[Tensor], Tensor]
) -> Tensor:
    """`attend` with `drop` on the weights, which are therefore materialised: B H S S numbers."""
    times = q_BHSK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = k_BGSK.repeat_interleave(times, 1), v_BGSK.repeat_interleave(times, 1)
    scores_BHST = q_BHSK @ k_BHSK.transpose(-1, -2) / math.sqrt(q_BHSK.shape[-1])
    if causal:
        later_ST = torch.ones(scores_BHST.shape[-2:], dtype=torch.bool, device=q_BHSK.device).triu(1)
        scores_BHST = scores_BHST.masked_fill(later_ST, -math.inf)
    return drop(scores_BHST.softmax(-1)) @ v_BHSK


class MatrixProduct(nn.Module):
    """Base of every module of the model that multiplies by a matrix."""

    product: Callable[..., Tensor] = staticmethod(F.linear)
    """Map of x, weight [out, in] and perhaps bias to x weight^T + bias."""


class Linear(nn.Linear, MatrixProduct):
    """nn.Linear that multiplies by `product`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class Unembed(MatrixProduct):
    """Head: x_BSD and the head's matrix, which may be the embedding, to logits_BSV. The bias is its own."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.vocabulary)) if config.masked_head else None

    def forward(self, x_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        return self.product(x_BSD, weight_VD, self.bias)


class Attention(nn.Module):
    """Projections around `attend`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        D, K, bias = config.width, config.head_width, config.bias
        self.causal, self.head_width = config.causal, K
        self.rotary_base = config.rotary_base if config.positions == "rotary" else None
        self.q_proj = Linear(D, config.heads * K, bias)
        self.k_proj = Linear(D, config.kv_heads * K, bias)
        self.v_proj = Linear(D, config.kv_heads * K, bias)
        self.o_proj = Linear(config.heads * K, D, bias)
        self.attend: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = attend
        self.weights_dropout, self.dropout = Dropout(config.dropout), Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        def heads(x: Tensor) -> Tensor:  # as many heads as the projection gives: all, or a rank's share
            per_head: Tensor = x.unflatten(-1, (-1, self.head_width))
            return per_head.transpose(1, 2)

        q_BHSK = heads(self.q_proj(x_BSD))
        k_BGSK = heads(self.k_proj(x_BSD))
        v_BGSK = heads(self.v_proj(x_BSD))
        if self.rotary_base is not None:
            cos, sin = angles(positions_S, self.head_width, self.rotary_base, q_BHSK.dtype)
            q_BHSK, k_BGSK = rotate(q_BHSK, cos, sin), rotate(k_BGSK, cos, sin)
        if self.weights_dropout.active:
            drop = partial(self.weights_dropout, positions_S=positions_S)
            y_BHSK = attend_and_drop(q_BHSK, k_BGSK, v_BGSK, self.causal, drop)
        else:
            y_BHSK = self.attend(q_BHSK, k_BGSK, v_BGSK, self.causal)
        y_BSD: Tensor = self.dropout(self.o_proj(y_BHSK.transpose(1, 2).flatten(2)), positions_S)
        return y_BSD


class FeedForward(nn.Module):
    """down(gelu(up(x))) as in GPT-2 and BERT, or SwiGLU: down(silu(gate(x)) * up(x)).

    SwiGLU is of Shazeer, "GLU variants improve Transformer", 2020.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        sizes = config.width, config.mlp_width, config.bias
        self.gelu = config.gelu
        self.gate_proj = Linear(*sizes) if config.mlp == "swiglu" else None
        self.up_proj = Linear(*sizes)
        self.down_proj = Linear(config.mlp_width, config.width, config.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.gate_proj is None:
            inner_BSF = F.gelu(self.up_proj(x_BSD), approximate=self.gelu)
        else:
            inner_BSF = F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD)
        y_BSD: Tensor = self.down_proj(inner_BSF)
        return y_BSD


def make_norm(config: TransformerConfig) -> nn.Module:
    """Return LayerNorm or RMSNorm, as the configuration says."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.width, config.epsilon)
    return nn.LayerNorm(config.width, config.epsilon)


def make_mlp(config: TransformerConfig) -> nn.Module:
    """Return a layer's MLP or mixture of experts. Any map of x_BSD to [B, S, D] can take its place."""
    if not config.experts:
        return FeedForward(config)
    width = config.shared_experts * config.mlp_width
    return MoE(config, FeedForward(replace(config, mlp_width=width)) if width else None)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `post_norm` norm(x + attention(x)), norm(x + mlp(x))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)
        self.dropout = Dropout(config.dropout)
        self.post_norm = config.post_norm

    def forward(self, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
        if self.post_norm:
            x_BSD = self.attention_norm(x_BSD + self.attention(x_BSD, positions_S))
            x_BSD = self.mlp_norm(x_BSD + self.dropout(self.mlp(x_BSD), positions_S))
        else:
            x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), positions_S)
            x_BSD = x_BSD + self.dropout(self.mlp(self.mlp_norm(x_BSD)), positions_S)
        return x_BSD


def run_layer(layer: nn.Module, x_BSD: Tensor, positions_S: Tensor) -> Tensor:
    """Return the layer's output."""
    y_BSD: Tensor = layer(x_BSD, positions_S)
    return y_BSD


class Transformer(nn.Module):
    """Transformer: tokens_BS -> logits_BSV. Under `with torch.device("meta")` it has shapes and no values.

    A part of the model gets the values that it has in the whole model by
    `initialise(model.layers[3], config, seed, prefix="layers.3.")`.
    """

    def __init__(self, config: TransformerConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        device = torch.get_default_device()
        with torch.device("meta"):  # torch's own initial values would be drawn for nothing
            self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
            learned = config.positions == "learned"
            self.embed_positions = nn.Embedding(config.sequence, config.width) if learned else None
            self.embed_types = nn.Embedding(config.token_types, config.width) if config.token_types else None
            self.embed_norm = make_norm(config) if config.post_norm else None
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
            self.transform = Linear(config.width, config.width, config.bias) if config.masked_head else None
            self.norm = make_norm(config)
            self.lm_head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
            self.unembed = Unembed(config)
        self.dropout = Dropout(config.dropout)
        self.run_layer: Callable[[nn.Module, Tensor, Tensor], Tensor] = run_layer
        self.loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = cross_entropy_sum
        for name, module in self.named_modules():
            if isinstance(module, Dropout):
                module.name, module.seed = name, seed
        self.to(dtype)
        if device.type != "meta":
            self.to_empty(device=device)
            initialise(self, config, seed)

    def forward(
        self, tokens_BS: Tensor, positions_S: Tensor | None = None, types_BS: Tensor | None = None
    ) -> Tensor:
        """Return logits_BSV. `positions_S`: the tokens' positions in the sequence; default: 0 to S - 1.

        types_BS: the tokens' types, for a model that has types; default: 0.

        Raises UsageError if the sequence is longer than the learned positions, and for types of a model without them.
        """
        if positions_S is None:
            positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.embed(tokens_BS, positions_S, types_BS)
        for layer in self.layers:
            x_BSD = self.run_layer(layer, x_BSD, positions_S)
        return self.head(x_BSD)

    def embed(self, tokens_BS: Tensor, positions_S: Tensor, types_BS: Tensor | None = None) -> Tensor:
        x_BSD: Tensor = self.embed_tokens(tokens_BS)
        if self.embed_positions is not None:
            if tokens_BS.shape[1] > self.config.sequence:
                raise UsageError(
                    f"a sequence of {tokens_BS.shape[1]} tokens is too long for a model with "
                    f"{self.config.sequence} learned positions"
                )
            x_BSD = x_BSD + self.embed_positions(positions_S)
        if self.embed_types is not None:
            x_BSD = x_BSD + self.embed_types(torch.zeros_like(positions_S) if types_BS is None else types_BS)
        elif types_BS is not None:
            raise UsageError("token types are given to a model that has none")
        if self.embed_norm is not None:
            x_BSD = self.embed_norm(x_BSD)
        x_BSD = self.dropout(x_BSD, positions_S)
        return x_BSD

    def head(self, x_BSD: Tensor) -> Tensor:
        if self.transform is not None:
            x_BSD = F.gelu(self.transform(x_BSD), approximate=self.config.gelu)
        matrix = self.embed_tokens if self.lm_head is None else self.lm_head
        logits_BSV: Tensor = self.unembed(self.norm(x_BSD), matrix.weight)
        return logits_BSV

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, sequence: int) -> int:
        """Return a token's operations, forward and backward: 6 * weights + 12 * layers * sequence * width.

        A multiply-add counts as two, the backward as twice the forward. The weights are those of matrix
        products: with the head, without embeddings, norms and biases (Kaplan et al., "Scaling laws", 2020,
        section 2.1), and of the experts only those that a token chose. The second term is attention, its
        masked half counted as if computed (Chowdhery et al., "PaLM", 2022, appendix B).
        """
        c = self.config
        matrices = sum(m.weight.numel() for m in self.layers.modules() if isinstance(m, nn.Linear))
        matrices += sum(m.active_weights() for m in self.layers.modules() if isinstance(m, MoE))
        matrices += c.width**2 if c.masked_head else 0
        return 6 * (matrices + c.vocabulary * c.width) + 12 * c.layers * sequence * c.width


def initial_value(name: str, shape: torch.Size, config: TransformerConfig, seed: int) -> Tensor:
    """Return the value that `initialise` gives the parameter of that name in the whole model, float64."""
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.float64)
    residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
    return torch.from_numpy(random.normals(seed, random.stream_of(name), shape.numel()) * std).view(shape)


@torch.no_grad()
def initialise(module: nn.Module, config: TransformerConfig, seed: int, prefix: str = "") -> None:
    """Set GPT-2's initial values: weights N(0, 0.02²), smaller into the residual stream; biases 0; norms 1.

    `prefix` is the module's place in the model, such as "layers.3.". The 2 * layers projections that add to
    the residual stream are scaled by 1 / sqrt(2 * layers) (Radford et al., 2019, section 2.3).
    """
    for name, p in module.named_parameters():
        p.copy_(initial_value(prefix + name, p.shape, config, seed))
    for buffer in module.buffers():  # the router's
        buffer.zero_()


def replace_linears(part: nn.Module, names: Collection[str], make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put make(linear) in the place of each linear layer inside `part` that has one of these names."""
    for module in list(part.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, nn.Linear):
                module.add_module(name, make(child))


def need_transformer(model: object, strategy: str, parts: str) -> None:
    """Raise TypeError unless the model is a Transformer. parts: what serves a model of another kind."""
    if not isinstance(model, Transformer):
        raise TypeError(
            f"{strategy} takes a Transformer of ours, not {type(model).__name__}; for a model of your own use {parts}"
        )


def cross_entropy_sum(
    logits_BSV: Tensor, targets_BS: Tensor, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return (sum of the cross-entropies in nats, number of targets), both scalars.

    The loss of a step is the first, summed over all ranks and micro-batches, divided by the second, summed
    likewise: never a mean of means, which differs if the parts have different sizes.
    """
    precise = torch.promote_types(logits_BSV.dtype, torch.float32)
    logits_NV, targets_N = logits_BSV.flatten(0, -2).to(precise), targets_BS.flatten()
    total = F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="sum")
    return total, (targets_N != ignore_index).sum()
