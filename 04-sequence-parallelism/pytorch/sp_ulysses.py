"""Ulysses: swap the split of the sequence for a split of the heads, attend with the plain kernel, swap back.

    q_BHsK  --all-to-all-->  q_BhSK    attention of h = H / n heads over all S tokens    o_BhSK  --all-to-all-->  o_BHsK

    rows: heads, columns: tokens, digits: the rank that holds it

         q, k, v             attention           o
         0 0 1 1             0 0 0 0             0 0 1 1
         0 0 1 1    --->     0 0 0 0    --->     0 0 1 1
         0 0 1 1             1 1 1 1             0 0 1 1
         0 0 1 1             1 1 1 1             0 0 1 1

Each head is whole on one rank, so causal work is even and any kernel will do. The adjoint of an all-to-all is the one
that takes the way back. With fewer key-value heads than ranks each is copied until every rank has one for its query
heads: G' = the least common multiple of G and n; autograd adds up the gradients of the copies.

Cost: a layer sends 2(n-1)/n times a rank's queries, keys, values and result: 2(n-1)/n B s K (2H + 2G') numbers; that
falls as 1/n, where all-gather (2(n-1) 2 B s G K) and ring (3(n-1) 2 B s G K) do not. Memory falls as 1/n. n may not be
over H, and must divide it. Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.

    python sp_ulysses.py --nproc 4    torchrun --nproc_per_node=4 sp_ulysses.py    mpirun -np 4 python sp_ulysses.py
    python sp_ulysses.py --nproc 4 --model llama-tiny

B batch  S sequence  s = S / n, a rank's tokens  H query heads  h = H / n  G key-value heads  K width of a head  n ranks
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import sp_basic
import sp_ring_attention
from rich.table import Table
from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_split import places
from sp_training import (
    SequenceOptions,
    bytes_of_run,
    bytes_of_step,
    check,
    check_heads,
    make_batches,
    shape_bytes,
    sp_group,
    version,
)
from torch import Tensor, nn

from common import collectives
from common.comm import Group
from common.comparison import prove
from common.ledger import show_bytes
from common.lesson import console, run
from common.models.configs import config
from common.models.transformer import Transformer, attend
from common.runtime import Runtime
from common.training import Version

VERSIONS = ("ulysses",)


@dataclass
class UlyssesOptions(SequenceOptions):
    """Which versions."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


def to_heads(x_BHsK: Tensor, group: Group) -> Tensor:
    """All heads of this rank's tokens to this rank's heads of all tokens: S(2) to S(1), [B, H/n, S, K]."""
    if group.size == 1:
        return x_BHsK
    x_nBhsK = x_BHsK.unflatten(1, (group.size, -1)).movedim(1, 0)  # n: who gets these heads
    x_nBhsK = collectives.all_to_all(x_nBhsK, group)  # n: whose tokens these are
    return x_nBhsK.movedim(0, 2).flatten(2, 3)


def to_tokens(x_BhSK: Tensor, group: Group) -> Tensor:
    """The way back: S(1) to S(2), [B, H, S/n, K]."""
    if group.size == 1:
        return x_BhSK
    x_nBhsK = x_BhSK.unflatten(2, (group.size, -1)).movedim(2, 0)  # n: who gets these tokens
    x_nBhsK = collectives.all_to_all(x_nBhsK, group)  # n: whose heads these are
    return x_nBhsK.movedim(0, 1).flatten(1, 2)


def copies(kv_heads: int, ranks: int) -> int:
    """How often each key-value head is repeated so that all ranks have equally many."""
    return math.lcm(kv_heads, ranks) // kv_heads


def exchanged(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's heads of q, k and v over all tokens; those of k and v are the ones that its queries read.

    Raises UsageError where the query heads do not divide over the ranks.
    """
    check_heads(q_BHsK.shape[1], group.size)
    times = copies(k_BGsK.shape[1], group.size)
    q_BhSK = to_heads(q_BHsK, group)
    k_BgSK, v_BgSK = (to_heads(x.repeat_interleave(times, 1), group) for x in (k_BGsK, v_BGsK))
    return q_BhSK, k_BgSK, v_BgSK


def ulysses_attention(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, causal: bool, group: Group) -> Tensor:
    """This rank's rows of attention, [B, H, s, K]; pieces of the sequence lie in the order of the ranks."""
    return to_tokens(attend(*exchanged(q_BHsK, k_BGsK, v_BGsK, group), causal), group)


def attention_bytes(o: SequenceOptions, ranks: int) -> int:
    """Bytes a rank sends for a layer's attention, forward and backward: q, k, v and o, but for its own share."""
    queries, keys = shape_bytes(o, ranks)
    exchanged = 2 * queries + 2 * keys * copies(config(o.model).kv_heads, ranks)
    return 2 * (ranks - 1) * exchanged // ranks


def make_version(name: str, model: Transformer, rt: Runtime, o: SequenceOptions) -> Version:
    """The model with its attention by heads."""
    return version(model, partial(ulysses_attention, group=sp_group(rt)), rt)


def step_bytes(name: str, model: nn.Module, group: Group, o: SequenceOptions) -> Fraction:
    """Bytes a rank sends in a step."""
    return bytes_of_step(model, group, o, attention_bytes(o, group.size))


def run_bytes(name: str, model: nn.Module, group: Group, o: SequenceOptions) -> Fraction:
    """Bytes a rank sends in `o.steps` steps."""
    return bytes_of_run(model, group, o, attention_bytes(o, group.size))


def bytes_table(o: SequenceOptions) -> Table:
    """What each strategy sends for a layer's attention, by formula, at other numbers of ranks."""
    c = config(o.model)
    formulas = {"allgather": sp_basic, "ring, zigzag": sp_ring_attention}
    title = (
        f"bytes a rank sends for a layer's attention: {o.model}, {o.batch} x {o.sequence} tokens, {o.dtype}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("ranks", *formulas, "ulysses"):
        table.add_column(column, justify="right")
    for n in (n for n in (2, 4, 8, 16) if o.sequence % n == 0):
        ours = show_bytes(attention_bytes(o, n)) if c.heads % n == 0 else f"no: {c.heads} heads"
        table.add_row(str(n), *(show_bytes(f.attention_bytes(o, n)) for f in formulas.values()), ours)
    return table


def main(rt: Runtime, o: UlyssesOptions) -> bool:
    """Prove, or with --benchmark time."""
    check(rt, VERSIONS, o, ["contiguous"])
    check_heads(o.shape[1] if o.benchmark else config(o.model).heads, rt.world_size)
    if not o.benchmark:
        console(rt).print(bytes_table(o))
        return prove(rt, o, make_version, run_bytes, step_bytes, (), make_batches=make_batches, axis="sp")
    (S, H, _), n = o.shape, rt.world_size
    pairs, sends = H // n * S * (S + 1) // 2, Fraction(2 * (n - 1) * 4, n)
    group = sp_group(rt)
    attend, mine = partial(ulysses_attention, group=group), partial(places, group=group, order="contiguous")
    return attention_benchmark(rt, o, {"ulysses": AttentionCase(attend, mine, pairs, sends)})


if __name__ == "__main__":
    run(main, UlyssesOptions)
