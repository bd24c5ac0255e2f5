"""Shared code of chapter 04's lessons: options and their checks, the model with another attention.

Only attention needs messages: embeddings, norms, projections, MLP, head and loss work on one token at a time,
with weights that every rank has. Their outputs are therefore complete, and the gradient of each weight is one
rank's share: the rule of common/comm/placement.py sums it over "sp", as it does over "dp".

    B batch  S sequence  s = S / n, a rank's tokens  H query heads  G key-value heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from common.comm import Group
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.training import TrainingOptions
from common.models.transformer import Layer, Transformer

from sp_block import Kernel, block
from sp_split import Order, check_length, longest_sequence

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q_BHsK, k_BGsK, v_BGsK, causal -> [B, H, s, K]


@dataclass
class SequenceOptions(TrainingOptions, without=("scaling",)):
    """Model and batch of the lessons of chapter 04."""

    batch: Size = 3
    """Samples of the global batch; every rank has a piece of each."""
    sequence: Size = 48
    """Tokens of a sample, all ranks together."""
    kernel: Kernel = "library"
    """Kernel for a block of attention: `hand`, written in sp_block.py, or `library`, torch's for CPUs."""
    shape: tuple[Size, Size, Size] = (8192, 8, 64)
    """Tokens, heads and width of a head of the attention that --benchmark times alone."""


def replace_attention(model: Transformer, attend: Attend, group: Group) -> None:
    """Make every layer attend by `attend` over the ranks of `group`; calls must then give positions.

    Raises UsageError for dropout of attention weights, which no rank holds whole, and on several ranks for
    experts with a capacity, which counts the tokens of whole sequences.
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
    """Raise UsageError where `ranks` does not divide the query heads; the message names numbers that do."""
    if heads % ranks:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UsageError(f"{heads} heads do not divide over {ranks} ranks; {fits} ranks would do")


def check_rows(inner: int, ranks: int) -> None:
    """Raise UsageError where rows of `inner` ranks do not divide the ranks."""
    if inner < 1 or ranks % inner:
        fits = ", ".join(str(u) for u in range(1, ranks + 1) if ranks % u == 0)
        raise UsageError(f"--inner {inner} does not divide {ranks} ranks; {fits} would")


def sp_group(rt: Runtime) -> Group:
    """Return the group of all ranks of the world, along sp."""
    return Mesh(rt.world, sp=rt.world_size).group("sp")


def check(rt: Runtime, o: SequenceOptions, orders: Mapping[str, Order], inner: int = 1) -> None:
    """Raise UsageError for options that cannot run, before any rank waits for another.

    orders: by version. inner: number of ranks that swap tokens for heads.
    """
    comparison.check(rt, tuple(orders), o)
    c = o.model_config()
    check_heads(o.shape[1] if o.benchmark else c.heads, inner)
    length, longest = (o.shape[0], None) if o.benchmark else (o.sequence, longest_sequence(c))
    for order in sorted(
        (orders[name] for name in o.versions), reverse=True
    ):  # zigzag, which needs more, first
        check_length(length, order, rt.world_size // inner, longest, inner)
    block(o.kernel, rt.device)
