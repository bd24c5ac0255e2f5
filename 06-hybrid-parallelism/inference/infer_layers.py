"""Attention, MLP and norms as decoding computes them: with the cache, and in as few operations as possible.

    [q | k | v] = x [Wq; Wk; Wv]^T  ->  rotate q and k  ->  k, v into the cache  ->  attention per part  ->  o_proj

With one token per sequence a product takes the time in which its matrix is read. The matrix fills the processor's
caches, so that each operation after the product starts slowly, and fewer operations take less time. One product gives
what several do in training, where they are long and joining them would save little. The weights of the projections
become rows of the joined matrix: the memory stays the same, and the parameters keep their names.

    T tokens of a step  D width  H query heads  G key-value heads of this rank  K width of a head
    E = H + 2 G: heads of queries, keys and values  F width of the MLP on this rank
    a part of a step (infer_step.py): R sequences, L rows of the cache each, m queries per key-value head

A processor looks up each page of memory in a small table. A weight of 12 MB has 3072 pages of 4 KiB or 6 of 2 MiB, and
is read some 5 % faster from the large ones.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.models.transformer import Attention, FeedForward, rotate
from common.utils.pages import in_large_pages

from infer_cache import Cache
from infer_step import Part, Step


def join(*projections: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weights of the projections, stacked by rows, and their biases, if they have some.

    Each projection's weight becomes a view of its rows.
    """
    weights = [p.get_parameter("weight").detach() for p in projections]
    biases = [p.get_parameter("bias").detach() for p in projections if p.bias is not None]
    joined = in_large_pages(torch.cat(weights))
    rows = joined.split([len(weight) for weight in weights])
    for projection, own in zip(projections, rows, strict=True):
        projection.weight = nn.Parameter(own, False)
    return joined, torch.cat(biases) if biases else None


class CachedAttention(nn.Module):
    """Attention of one layer: stores the step's keys and values, and attends to all that are cached.

    Works in inference mode only, because it rotates queries and keys in place.
    """

    step: Step  # set before each forward pass

    def __init__(self, attention: Attention, cache: Cache, layer: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj = attention.o_proj
        self.joined, self.bias = join(self.q_proj, self.k_proj, self.v_proj)
        self.cache, self.layer, self.width = cache, layer, attention.head_width
        self.queries = len(self.q_proj.weight) // self.width

    def forward(self, x_1TD: Tensor, _: Tensor) -> Tensor:
        step, H, G = self.step, self.queries, self.cache.kv_heads
        qkv_TEK = F.linear(x_1TD[0], self.joined, self.bias).view(x_1TD.shape[1], -1, self.width)
        qk_TeK = qkv_TEK[:, : H + G]
        qk_TeK.copy_(rotate(qk_TeK, step.cos_T1K, step.sin_T1K))
        self.cache.write(self.layer, step.slots_T, qkv_TEK[:, H:].unflatten(1, (2, G)))
        of_parts = [self.attend(part, qkv_TEK[part.begin : part.end, :H]) for part in step.parts]
        y_THK = torch.cat(of_parts) if len(of_parts) > 1 else of_parts[0]
        y_1TD: Tensor = self.o_proj(y_THK.flatten(1)[None])
        return y_1TD

    def attend(self, part: Part, q_THK: Tensor) -> Tensor:
        """Return the attention of a part's tokens, [T, H, K]."""
        k_RGLK, v_RGLK = self.cache.read(self.layer, part.slots_RL)
        (T, H, K), (R, G) = q_THK.shape, k_RGLK.shape[:2]
        q_RGmK = q_THK.view(R, T // R, G, H // G, K).permute(0, 2, 3, 1, 4).reshape(R, G, -1, K)
        y_RGmK = F.scaled_dot_product_attention(q_RGmK, k_RGLK, v_RGLK, part.mask_R1mL)
        return y_RGmK.view(R, G, H // G, T // R, K).permute(0, 3, 1, 2, 4).reshape(T, H, K)


class JoinedFeedForward(nn.Module):
    """SwiGLU with gate and up as one product."""

    def __init__(self, mlp: FeedForward) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        assert self.gate_proj is not None
        self.joined, self.bias = join(self.gate_proj, self.up_proj)

    def forward(self, x_1TD: Tensor) -> Tensor:
        gate_1TF, up_1TF = F.linear(x_1TD, self.joined, self.bias).chunk(2, -1)
        y_1TD: Tensor = self.down_proj(F.silu(gate_1TF).mul_(up_1TF))
        return y_1TD


class Norm(nn.Module):
    """RMSNorm in four operations; on a CPU torch's own takes ten, and for one token each has its start.

    The root of D (mean(x^2) + eps) is the hypotenuse of |x| and sqrt(D eps).
    """

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight, width = norm.weight, norm.normalized_shape[0]
        self.wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        self.scale_D = self.weight.detach().to(self.wide) * math.sqrt(width)
        eps = torch.finfo(self.weight.dtype).eps if norm.eps is None else norm.eps
        self.least = self.scale_D.new_tensor(math.sqrt(width * eps))

    def forward(self, x_1TD: Tensor) -> Tensor:
        length_1T1 = torch.linalg.vector_norm(x_1TD, dim=-1, keepdim=True, dtype=self.wide)
        return x_1TD.div(torch.hypot(length_1T1, self.least)).mul_(self.scale_D).to(x_1TD.dtype)


def sum_in_place(x: Tensor, group: Group) -> Tensor:
    """Sum a partial result over the ranks in its own memory. Training sums a copy, as autograd may keep the result."""
    comm.all_reduce(x, group)
    return x
