"""What the lessons of chapter 04 share: options, the model with another attention, bytes of a step by formula.

Everything but attention is free: embeddings, norms, projections, MLP, head and loss work on one token at a time, with
weights that every rank has. So their outputs are right at once, and the gradient of each weight is one rank's share:
the rule of common/placement.py sums it over "sp", as it does over "dp".

    B batch  S sequence  s = S / n, a rank's tokens  H query heads  G key-value heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import cast

import torch
from sp_block import Kernel, block
from sp_split import Order, check_length, longest_sequence, split_sequence
from torch import Tensor, nn

from common import comparison
from common.comm import Group
from common.errors import UsageError
from common.lesson import DTYPES
from common.mesh import Mesh
from common.models.configs import config
from common.models.transformer import Layer, Transformer
from common.options import Size
from common.placement import sum_gradients
from common.runtime import Runtime
from common.training import Batches, TrainingOptions, Version

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q_BHsK, k_BGsK, v_BGsK, causal -> [B, H, s, K]


@dataclass
class SequenceOptions(TrainingOptions, without=("scaling",)):
    """Model and batch of the lessons of chapter 04."""

    batch: Size = 3
    """Samples of the global batch; every rank has a piece of each."""
    sequence: Size = 48
    """Tokens of a sample, all ranks together."""
    kernel: Kernel = "library"
    """How a block of attention is computed: by the lines of sp_block.py, or by torch's kernel for CPUs."""
    shape: tuple[Size, Size, Size] = (8192, 8, 64)
    """Tokens, heads and width of a head: the attention that --benchmark times, alone."""


def replace_attention(model: Transformer, attend: Attend, group: Group) -> None:
    """Let every layer compute attention by `attend` over the ranks of `group`; from then on positions must be given.

    Raises UsageError where attention weights are dropped: nobody holds them whole. And where experts have a capacity:
    it counts the tokens of whole sequences.
    """
    if group.size > 1 and model.config.experts and model.config.capacity_factor is not None:
        raise UsageError(
            f"sequence parallelism cuts the sequences of which an expert takes {model.config.capacity_factor:g} times "
            f"an even share: give a model with capacity_factor=None"
        )
    for layer in model.layers:
        attention = cast(Layer, layer).attention
        if attention.weights_dropout.p > 0:
            raise UsageError(
                f"sequence parallelism cannot drop attention weights (dropout {attention.weights_dropout.p:g}): "
                f"give 0, or set attention.weights_dropout.p = 0 in every layer; the other dropouts may stay"
            )
        attention.attend = attend

    def need_positions(model: nn.Module, args: tuple[object, ...], given: dict[str, object]) -> None:
        if len(args) + len(given) < 2:
            raise UsageError(
                "a model under sequence parallelism needs its tokens' positions: "
                "tokens, positions, targets = split_sequence(...), then model(tokens, positions)"
            )

    if group.size > 1:
        model.register_forward_pre_hook(need_positions, with_kwargs=True)


def check_heads(heads: int, ranks: int) -> None:
    """Raises UsageError where the query heads do not divide over `ranks`, naming numbers of ranks that would do."""
    if heads % ranks:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UsageError(f"{heads} heads do not divide over {ranks} ranks; {fits} ranks would do")


def make_batches(o: SequenceOptions, group: Group, device: torch.device) -> Batches:
    """Whole samples on every rank; the version takes its piece of each."""
    return Batches(o, Group("one", 0, 1, (0,)), device)


def sp_group(rt: Runtime) -> Group:
    """All ranks of the world, along sp."""
    return Mesh(rt.world, sp=rt.world_size).group("sp")


def version(
    model: Transformer,
    attend: Attend,
    rt: Runtime,
    order: Order = "contiguous",
    split: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Version:
    """The model with its attention replaced, its part of a batch cut, its gradients summed.

    split(tokens_BS, targets_BS): (tokens_Bs, positions_s, targets_Bs); all ranks in `order` when left out.
    """
    mesh = Mesh(rt.world, sp=rt.world_size)
    group = mesh.group("sp")
    replace_attention(model, attend, group)
    cut = split or partial(split_sequence, group=group, order=order, longest=longest_sequence(model.config))
    return Version(model, split=cut, finish=partial(sum_gradients, list(model.parameters()), mesh))


def check(rt: Runtime, known: tuple[str, ...], o: SequenceOptions, orders: Iterable[Order]) -> None:
    """Refuse what cannot run, before any rank waits for another."""
    comparison.check(rt, known, o)
    for order in sorted(orders, reverse=True):  # zigzag, which needs more, first
        if o.benchmark:
            check_length(o.shape[0], order, rt.world_size)
        else:
            check_length(o.sequence, order, rt.world_size, longest_sequence(config(o.model)))
    block(o.kernel, rt.device)


def shape_bytes(o: SequenceOptions, ranks: int) -> tuple[int, int]:
    """Bytes of a rank's queries, B s H K, and of its keys, B s G K, for the whole batch."""
    c, size = config(o.model), DTYPES[o.dtype].itemsize
    tokens = o.batch * o.sequence // ranks
    return tokens * c.heads * c.head_width * size, tokens * c.kv_heads * c.head_width * size


def bytes_of_step(model: nn.Module, group: Group, o: SequenceOptions, attention: Fraction | int) -> Fraction:
    """Bytes a rank sends in a step: `attention` a layer; 2(n-1)/n of the gradients, the loss, the targets (8)."""
    numbers, size = sum(p.numel() for p in model.parameters()) + 1, DTYPES[o.dtype].itemsize
    summed = Fraction(2 * (group.size - 1) * (numbers * size + 8), group.size)
    return config(o.model).layers * Fraction(attention) + summed


def bytes_of_run(model: nn.Module, group: Group, o: SequenceOptions, attention: Fraction | int) -> Fraction:
    """Bytes a rank sends in `o.steps` steps, each with the 8 bytes of its gradient norm, all-reduced."""
    norm = Fraction(2 * (group.size - 1) * 8, group.size)
    return o.steps * (bytes_of_step(model, group, o, attention) + norm)
