"""Sequence parallelism in two dimensions: Ulysses inside, a ring across.

    rank = row * u + column     the u ranks of a row swap tokens for heads, the p ranks of a column pass on keys

             column 0                       column 1
    row 0    tokens 0..3    all-to-all      tokens 4..7          then: heads 0 1 of 0..7     heads 2 3 of 0..7
                |  ring                        |  ring                      |  ring               |  ring
    row 1    tokens 8..11   all-to-all      tokens 12..15              heads 0 1 of 8..15    heads 2 3 of 8..15

Heads limit Ulysses, not the product: u divides H, p is free. The all-to-all, which needs everybody's wires at once,
stays inside a host; between hosts a ring passes on messages that the multiply hides. In zigzag order a row holds
chunks row and 2p-1-row of 2p, and cuts them among its columns. Fang and Zhao, "USP", arXiv:2405.07719.

Cost: a layer sends 2(u-1)/u B s K (2H + 2G') numbers in its row and 3(p-1) 2 B s G' K in its column, s = S / (u p),
G' the key-value heads with the copies that u ranks need (sp_ulysses.py). Memory: as the ring's, 1/(u p).

    python sp_hybrid.py --nproc 4 --inner 2                 torchrun --nproc_per_node=4 sp_hybrid.py
    mpirun -np 8 python sp_hybrid.py --inner 4

B batch  S sequence  s a rank's tokens  H query heads  h = H / u  G key-value heads  K width of a head
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial

import torch.distributed as dist
from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_block import Kernel, block
from sp_ring_attention import ring_attention, work
from sp_split import Order, check_length, longest_sequence, places
from sp_training import (
    SequenceOptions,
    bytes_of_run,
    bytes_of_step,
    check_heads,
    make_batches,
    shape_bytes,
    sp_group,
    version,
)
from sp_ulysses import copies, exchanged, to_tokens
from torch import Tensor, nn

from common import comparison
from common.comm import Group
from common.comparison import prove
from common.errors import UsageError
from common.lesson import run
from common.models.configs import config
from common.models.transformer import Transformer
from common.options import Count
from common.runtime import Runtime
from common.training import Version

ORDERS: dict[str, Order] = {"hybrid": "contiguous", "hybrid-zigzag": "zigzag"}
VERSIONS = tuple(ORDERS)


@dataclass
class HybridOptions(SequenceOptions):
    """Which versions, and how many ranks swap heads."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""
    inner: Count = 2
    """Ranks of a row, which swap tokens for heads; the others of their column make a ring."""


@dataclass(frozen=True)
class Grid:
    """The ranks of one row and of one column."""

    row: Group
    column: Group


def grid(sp: Group, inner: int, timeout: float | None = None) -> Grid:
    """Rows of `inner` neighbouring ranks of the group. Every rank of the group must call this.

    timeout: seconds, the longest that a wait may last. Raises UsageError where `inner` does not divide the ranks.
    """
    if inner < 1 or sp.size % inner:
        fits = ", ".join(str(u) for u in range(1, sp.size + 1) if sp.size % u == 0)
        raise UsageError(f"rows of {inner} ranks do not divide {sp.size} ranks; rows of {fits} would")
    row, column = divmod(sp.rank, inner)
    members = [range(row * inner, (row + 1) * inner), range(column, sp.size, inner)]
    return Grid(
        *(
            _part(sp, name, list(of), timeout)
            for name, of in zip(("sp row", "sp column"), members, strict=True)
        )
    )


def _part(sp: Group, name: str, members: list[int], timeout: float | None) -> Group:
    """Some of the group's ranks, in their order; only they take part in making it."""
    ranks = tuple(sp.ranks[member] for member in members)
    pg = None
    if len(ranks) == sp.size:
        pg = sp.pg
    elif len(ranks) > 1:
        limit = None if timeout is None else timedelta(seconds=timeout)
        pg = dist.new_group(list(ranks), limit, use_local_synchronization=True)
    return Group(name, members.index(sp.rank), len(ranks), ranks, pg)


def hybrid_places(length: int, on: Grid, order: Order) -> Tensor:
    """Indices, in rising order, of this rank's tokens among `length`: its column's piece of its row's."""
    check_length(length, order, on.column.size, inner=on.row.size)
    of_row = places(length, on.column, order)
    return of_row[places(len(of_row), on.row, "contiguous")]


def split_hybrid(
    tokens_BS: Tensor, targets_BS: Tensor, on: Grid, order: Order, longest: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's (tokens_Bs, positions_s, targets_Bs), as `sp_split.split_sequence`."""
    check_length(tokens_BS.shape[1], order, on.column.size, longest, on.row.size)
    positions_s = hybrid_places(tokens_BS.shape[1], on, order).to(tokens_BS.device)
    return tokens_BS[:, positions_s], positions_s, targets_BS[:, positions_s]


def hybrid_attention(
    q_BHsK: Tensor,
    k_BGsK: Tensor,
    v_BGsK: Tensor,
    causal: bool,
    on: Grid,
    order: Order = "contiguous",
    kernel: Kernel = "library",
) -> Tensor:
    """This rank's rows of attention, [B, H, s, K]; pieces of the sequence lie as `hybrid_places` cuts them."""
    qkv_BhtK = exchanged(q_BHsK, k_BGsK, v_BGsK, on.row)  # t: the tokens of the row
    return to_tokens(ring_attention(*qkv_BhtK, causal, on.column, order, kernel), on.row)


def attention_bytes(o: HybridOptions, ranks: int) -> int:
    """Bytes a rank sends for a layer's attention, forward and backward: along its row, down its column."""
    queries, keys = shape_bytes(o, ranks)
    keys *= copies(config(o.model).kv_heads, o.inner)
    along_the_row = 2 * (o.inner - 1) * (2 * queries + 2 * keys) // o.inner
    return along_the_row + 3 * (ranks // o.inner - 1) * 2 * keys


def make_version(name: str, model: Transformer, rt: Runtime, o: HybridOptions) -> Version:
    """The model with hybrid attention, the ring in contiguous or zigzag order."""
    on = grid(sp_group(rt), o.inner, rt.timeout)
    attend = partial(hybrid_attention, on=on, order=ORDERS[name], kernel=o.kernel)
    split = partial(split_hybrid, on=on, order=ORDERS[name], longest=longest_sequence(model.config))
    return version(model, attend, rt, split=split)


def step_bytes(name: str, model: nn.Module, group: Group, o: HybridOptions) -> Fraction:
    """Bytes a rank sends in a step."""
    return bytes_of_step(model, group, o, attention_bytes(o, group.size))


def run_bytes(name: str, model: nn.Module, group: Group, o: HybridOptions) -> Fraction:
    """Bytes a rank sends in `o.steps` steps."""
    return bytes_of_run(model, group, o, attention_bytes(o, group.size))


def check(rt: Runtime, o: HybridOptions) -> None:
    """Refuse what cannot run, before any rank waits for another."""
    comparison.check(rt, VERSIONS, o)
    if rt.world_size % o.inner:
        fits = ", ".join(str(u) for u in range(1, rt.world_size + 1) if rt.world_size % u == 0)
        raise UsageError(f"--inner {o.inner} does not divide {rt.world_size} ranks; {fits} would")
    check_heads(o.shape[1] if o.benchmark else config(o.model).heads, o.inner)
    length, longest = (o.shape[0], None) if o.benchmark else (o.sequence, longest_sequence(config(o.model)))
    for order in sorted((ORDERS[name] for name in o.versions), reverse=True):  # zigzag needs more
        check_length(length, order, rt.world_size // o.inner, longest, o.inner)
    block(o.kernel, rt.device)


def main(rt: Runtime, o: HybridOptions) -> bool:
    """Prove, or with --benchmark time."""
    check(rt, o)
    if not o.benchmark:
        return prove(rt, o, make_version, run_bytes, step_bytes, (), make_batches=make_batches, axis="sp")
    on, cases = grid(sp_group(rt), o.inner, rt.timeout), {}
    u, p, t = on.row.size, on.column.size, o.shape[0] // on.column.size
    for name in o.versions:
        items = [work(ORDERS[name], True, on.column.rank, owner, t) for owner in range(p)]
        pairs = o.shape[1] // u * sum(item.pairs(t) for item in items if item)
        attend = partial(hybrid_attention, on=on, order=ORDERS[name], kernel=o.kernel)
        sends = Fraction(2 * (u - 1) * 4, u) + 3 * (p - 1) * 2
        cases[name] = AttentionCase(attend, partial(hybrid_places, on=on, order=ORDERS[name]), pairs, sends)
    return attention_benchmark(rt, o, cases)


if __name__ == "__main__":
    run(main, HybridOptions)
