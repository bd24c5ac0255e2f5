"""Sequence parallelism as one call, which changes a plain Transformer to run along one group.

    sequence_parallel(model, mesh.group("sp"), attention="zigzag")
    tokens, positions, targets = split_sequence(tokens, targets, mesh.group("sp"), ORDERS["zigzag"])
    cross_entropy_sum(model(tokens, positions), targets)[0].backward()
    sum_gradients(model.parameters(), mesh)

    attention    tokens on rank r          sends for a layer, numbers          causal work   heads
    allgather    piece r of n              2(n-1) 2 B s G K                    uneven        any
    ulysses      piece r of n              2(n-1)/n B s K (2H + 2G')           even          n divides H
    ring         piece r of n              3(n-1) 2 B s G K, hidden            uneven        any
    zigzag       pieces r, 2n-1-r of 2n    3(n-1) 2 B s G K, hidden            even          any

All parameters stay whole on every rank, and their gradients are one rank's share: the rule of
common/comm/placement.py sums them over "sp". Dropout of embeddings and of the layers' outputs depends on positions
and works unchanged; dropout of attention weights raises UsageError. sp_hybrid.py is the fifth way.

B batch  s a rank's tokens  H query heads  G key-value heads, G' with copies  K width of a head  n ranks
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from common.comm import Group
from common.errors import UsageError
from common.models.transformer import Transformer, need_transformer

from sp_basic import gathered_attention
from sp_block import Kernel, block
from sp_ring_attention import ring_attention
from sp_split import Order, split_sequence
from sp_training import Attend, check_heads, replace_attention
from sp_ulysses import ulysses_attention

__all__ = ["ORDERS", "sequence_parallel", "split_sequence"]

Attention = Literal["allgather", "ulysses", "ring", "zigzag"]
ORDERS: dict[str, Order] = {
    "allgather": "contiguous",
    "ulysses": "contiguous",
    "ring": "contiguous",
    "zigzag": "zigzag",
}


def attends(group: Group, kernel: Kernel) -> dict[str, Attend]:
    """Return each attention over the ranks of the group, by name."""
    return {
        "allgather": partial(gathered_attention, group=group),
        "ulysses": partial(ulysses_attention, group=group),
        "ring": partial(ring_attention, group=group, order="contiguous", kernel=kernel),
        "zigzag": partial(ring_attention, group=group, order="zigzag", kernel=kernel),
    }


def sequence_parallel(
    model: Transformer, group: Group, attention: Attention = "ring", kernel: Kernel | None = None
) -> None:
    """Make every layer attend over the ranks of `group`, each of which holds its tokens of `split_sequence`.

    kernel: the kernel of a ring for a block, by default `library` on CPUs and `hand` elsewhere. Raises
    UsageError for an attention that is unknown, heads that do not divide (ulysses), dropped attention
    weights; TypeError for another model.
    """
    need_transformer(model, "sequence_parallel", "ring_attention, as examples/your_own_model.py does")
    if attention not in ORDERS:
        raise UsageError(f"attention {attention!r} is unknown; choose one of {', '.join(ORDERS)}")
    if attention == "ulysses":
        check_heads(model.config.heads, group.size)
    device = next(model.parameters()).device
    kernel = kernel or ("library" if device.type == "cpu" else "hand")
    if device.type != "meta":  # on "meta" the final device is not known yet
        block(kernel, device)
    replace_attention(model, attends(group, kernel)[attention], group)
