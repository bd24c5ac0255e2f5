"""Sequence parallelism in two dimensions: Ulysses inside, a ring across.

    rank = row * u + column     the u ranks of a row swap tokens for heads, the p ranks of a column pass on keys

             column 0                       column 1
    row 0    tokens 0..3    all-to-all      tokens 4..7          then: heads 0 1 of 0..7     heads 2 3 of 0..7
                |  ring                        |  ring                      |  ring               |  ring
    row 1    tokens 8..11   all-to-all      tokens 12..15              heads 0 1 of 8..15    heads 2 3 of 8..15

The number of heads limits u, which divides H, but not p. The all-to-all, which uses all links at once, stays
inside a host; between hosts the messages of a ring overlap with the computation. In zigzag order a row holds
chunks row and 2p-1-row of 2p, and cuts them among its columns. Fang and Zhao, "USP", arXiv:2405.07719.

Cost: a layer sends 2(u-1)/u B s K (2H + 2G') numbers in its row and 3(p-1) 2 B s G' K in its column, s = S /
(u p), G' the key-value heads with the copies that u ranks need (sp_ulysses.py). Memory: 1/(u p), as for the
ring.

    python sp_hybrid.py --nproc 4 --inner 2                 torchrun --nproc_per_node=4 sp_hybrid.py
    mpirun -np 8 python sp_hybrid.py --inner 4

B batch  S sequence  s a rank's tokens  H query heads  h = H / u  G key-value heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import partial

import torch.distributed as dist
from torch import Tensor

from common.comm import Group
from common.comm.placement import sum_gradients
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.comparison import Lesson, prove
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.configs import config
from common.models.transformer import cross_entropy_sum

from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_block import Kernel, block
from sp_costs import grid_bytes, step_bytes
from sp_options import GridOptions
from sp_ring_attention import ring_attention, work
from sp_split import Order, check_length, longest_sequence, places
from sp_training import check_heads, replace_attention, sp_group
from sp_ulysses import exchanged, to_tokens

ORDERS: dict[str, Order] = {"hybrid": "contiguous", "hybrid-zigzag": "zigzag"}
VERSIONS = tuple(ORDERS)


@dataclass
class HybridOptions(GridOptions):
    """Options: the versions to run, and the number of ranks that swap heads."""

    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""


@dataclass(frozen=True)
class Grid:
    """Groups of this rank in the grid: its row and its column."""

    row: Group
    column: Group


def grid(sp: Group, inner: int, timeout: float | None = None) -> Grid:
    """Arrange the group in rows of `inner` neighbouring ranks. Every rank of the group must call this.

    timeout: of the new process groups, in seconds. Raises UsageError where `inner` does not divide the
    group's size.
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
    """Return the group of these members, in their order; only they take part in creating it."""
    ranks = tuple(sp.ranks[member] for member in members)
    pg = None
    if len(ranks) == sp.size:
        pg = sp.pg
    elif len(ranks) > 1:
        limit = None if timeout is None else timedelta(seconds=timeout)
        pg = dist.new_group(list(ranks), limit, use_local_synchronization=True)
    return Group(name, members.index(sp.rank), len(ranks), ranks, pg)


def hybrid_places(length: int, on: Grid, order: Order) -> Tensor:
    """Return indices, in rising order, of this rank's tokens among `length`: its part of its row's tokens."""
    check_length(length, order, on.column.size, inner=on.row.size)
    of_row = places(length, on.column, order)
    return of_row[places(len(of_row), on.row, "contiguous")]


def split_hybrid(
    tokens_BS: Tensor, targets_BS: Tensor, on: Grid, order: Order, longest: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's (tokens_Bs, positions_s, targets_Bs), like `sp_split.split_sequence`."""
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
    """Return this rank's rows of attention, [B, H, s, K]; the sequence is cut by `hybrid_places`."""
    qkv_BhtK = exchanged(q_BHsK, k_BGsK, v_BGsK, on.row)  # t: the tokens of the row
    return to_tokens(ring_attention(*qkv_BhtK, causal, on.column, order, kernel), on.row)


def train(job: Job[HybridOptions]) -> Iterator[Tensor]:
    """Train on this rank's tokens of every sequence; yield the loss of each global batch."""
    model, group, order = job.model, job.group, ORDERS[job.version]
    on = grid(group, job.options.inner, job.rt.timeout)
    attend = partial(hybrid_attention, on=on, order=order, kernel=job.options.kernel)
    replace_attention(model, attend, group)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # whole sequences, the same on all ranks
        pieces = batch.cut(partial(split_hybrid, on=on, order=order, longest=longest_sequence(model.config)))
        count = pieces.count_targets(group)  # of all ranks: an all-reduce of 8 bytes
        losses = []
        optimizer.zero_grad()
        for tokens_Bs, positions_s, targets_Bs in pieces:
            loss_sum, _ = cross_entropy_sum(model(tokens_Bs, positions_s), targets_Bs)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        sum_gradients(model.parameters(), job.mesh)  # each rank has a part of every gradient
        optimizer.step()
        yield total(losses, group)


def check(rt: Runtime, o: HybridOptions) -> None:
    """Raise UsageError for options that cannot run, before any rank waits for another."""
    comparison.check(rt, VERSIONS, o)
    if rt.world_size % o.inner:
        fits = ", ".join(str(u) for u in range(1, rt.world_size + 1) if rt.world_size % u == 0)
        raise UsageError(f"--inner {o.inner} does not divide {rt.world_size} ranks; {fits} would")
    check_heads(o.shape[1] if o.benchmark else config(o.model).heads, o.inner)
    length, longest = (o.shape[0], None) if o.benchmark else (o.sequence, longest_sequence(config(o.model)))
    for order in sorted((ORDERS[name] for name in o.versions), reverse=True):  # zigzag needs more
        check_length(length, order, rt.world_size // o.inner, longest, o.inner)
    block(o.kernel, rt.device)


LESSON = Lesson("sp", dict.fromkeys(VERSIONS, train), step_bytes(grid_bytes))


def main(rt: Runtime, o: HybridOptions) -> bool:
    """Prove equality with one device, or with --benchmark time attention alone."""
    check(rt, o)
    if not o.benchmark:
        return prove(rt, o, LESSON)
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
