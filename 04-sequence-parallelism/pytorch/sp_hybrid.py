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
from functools import partial

from torch import Tensor

from common.comm import Group
from common.comm.placement import sum_gradients
from common.launch.command_line import Count
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_block import Kernel
from sp_costs import grid_bytes, step_bytes
from sp_ring_attention import ring_attention
from sp_split import Order, longest_sequence, split_sequence
from sp_training import SequenceOptions, check, check_rows, replace_attention, sp_group
from sp_ulysses import exchanged, to_tokens

ORDERS: dict[str, Order] = {"hybrid": "contiguous", "hybrid-zigzag": "zigzag"}


@dataclass
class HybridOptions(SequenceOptions):
    """Options: the number of ranks that swap heads."""

    inner: Count = 2
    """Ranks per row, which swap tokens for heads; the ranks of a column form a ring."""


def grid(sp: Group, inner: int, timeout: float | None = None) -> tuple[Group, Group]:
    """Arrange the group in rows of `inner` neighbouring ranks; return this rank's row and its column.

    Every rank of the group must call this. timeout: of the new process groups, in seconds. Raises UsageError as
    `check_rows`.
    """
    check_rows(inner, sp.size)
    row, column = divmod(sp.rank, inner)
    of_row = sp.part("sp row", range(row * inner, (row + 1) * inner), timeout)
    return of_row, sp.part("sp column", range(column, sp.size, inner), timeout)


def hybrid_attention(
    q_BHsK: Tensor,
    k_BGsK: Tensor,
    v_BGsK: Tensor,
    causal: bool,
    row: Group,
    column: Group,
    order: Order = "contiguous",
    kernel: Kernel = "library",
) -> Tensor:
    """Return this rank's rows of attention, [B, H, s, K]; `places(S, column, order, row)` cuts the sequence."""
    qkv_BhtK = exchanged(q_BHsK, k_BGsK, v_BGsK, row)  # t: the tokens of the row
    return to_tokens(ring_attention(*qkv_BhtK, causal, column, order, kernel), row)


def train(job: Job[HybridOptions]) -> Iterator[Tensor]:
    """Train on this rank's tokens of every sequence; yield the loss of each global batch."""
    model, group, order = job.model, job.group, ORDERS[job.version]
    row, column = grid(group, job.options.inner, job.rt.timeout)
    attend = partial(hybrid_attention, row=row, column=column, order=order, kernel=job.options.kernel)
    replace_attention(model, attend, group)
    longest = longest_sequence(model.config)
    cut = partial(split_sequence, group=column, order=order, longest=longest, inner=row)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # whole sequences, the same on all ranks
        pieces = batch.cut(cut)
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


def hybrid_bytes(o: HybridOptions, ranks: int) -> int:
    """Return the bytes a rank sends for a layer's attention."""
    return grid_bytes(o, ranks, o.inner)


LESSON = Lesson("sp", dict.fromkeys(ORDERS, train), step_bytes(hybrid_bytes))


def main(rt: Runtime, o: HybridOptions) -> bool:
    """Prove equality with one device, or with --benchmark time attention alone."""
    check_rows(o.inner, rt.world_size)
    check(rt, o, ORDERS, o.inner)
    if not o.benchmark:
        return prove(rt, o, LESSON)
    (row, column), cases = grid(sp_group(rt), o.inner, rt.timeout), {}
    for name in o.versions:
        attend = partial(hybrid_attention, row=row, column=column, order=ORDERS[name], kernel=o.kernel)
        cases[name] = AttentionCase(attend, hybrid_bytes, column, ORDERS[name], row)
    return attention_benchmark(rt, o, cases)


if __name__ == "__main__":
    run(main, HybridOptions, versions=LESSON.versions)
