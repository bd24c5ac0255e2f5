"""Ulysses: swap the split of the sequence for a split of the heads, attend with the plain kernel, swap back.

    q_BHsK  --all-to-all-->  q_BhSK    attention of h = H / n heads over all S tokens    o_BhSK  --all-to-all-->  o_BHsK

    rows: heads, columns: tokens, digits: the rank that holds it

         q, k, v             attention           o
         0 0 1 1             0 0 0 0             0 0 1 1
         0 0 1 1    --->     0 0 0 0    --->     0 0 1 1
         0 0 1 1             1 1 1 1             0 0 1 1
         0 0 1 1             1 1 1 1             0 0 1 1

Each head is whole on one rank, so causal work is even and any kernel will do. The adjoint of an all-to-all is
the reverse all-to-all. If n does not divide the key-value heads, each of them is copied until all ranks have
equally many: G' = the least common multiple of G and n; autograd adds up the gradients of the copies.

Cost: a layer sends 2(n-1)/n times a rank's queries, keys, values and result: 2(n-1)/n B s K (2H + 2G')
numbers; that falls as 1/n, where all-gather (2(n-1) 2 B s G K) and ring (3(n-1) 2 B s G K) do not. Memory
falls as 1/n. n must divide H. Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509.

    python sp_ulysses.py --nproc 4    torchrun --nproc_per_node=4 sp_ulysses.py    mpirun -np 4 python sp_ulysses.py
    python sp_ulysses.py --nproc 4 --model llama-tiny

B batch  S sequence  s = S / n, a rank's tokens  H query heads  h = H / n  G key-value heads  K width of a head  n ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from common.comm import Group, collectives
from common.comm.placement import sum_gradients
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.models.transformer import attend, cross_entropy_sum

from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_costs import bytes_table, copies, step_bytes, ulysses_bytes
from sp_split import ALONE, longest_sequence, split_sequence
from sp_training import SequenceOptions, check, check_heads, replace_attention, sp_group


def to_heads(x_BHsK: Tensor, group: Group) -> Tensor:
    """Swap all heads of own tokens for own heads of all tokens: S(2) to S(1), [B, H/n, S, K]."""
    if group.size == 1:
        return x_BHsK
    x_nBhsK = x_BHsK.unflatten(1, (group.size, -1)).movedim(1, 0)  # n: the rank that gets these heads
    x_nBhsK = collectives.all_to_all(x_nBhsK, group)  # n: the rank of these tokens
    return x_nBhsK.movedim(0, 2).flatten(2, 3)


def to_tokens(x_BhSK: Tensor, group: Group) -> Tensor:
    """Undo `to_heads`: S(1) to S(2), [B, H, S/n, K]."""
    if group.size == 1:
        return x_BhSK
    x_nBhsK = x_BhSK.unflatten(2, (group.size, -1)).movedim(2, 0)  # n: the rank that gets these tokens
    x_nBhsK = collectives.all_to_all(x_nBhsK, group)  # n: the rank of these heads
    return x_nBhsK.movedim(0, 1).flatten(1, 2)


def exchanged(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's heads of q, k, v over all tokens; its key-value heads are those its queries read.

    Raises UsageError where the query heads do not divide over the ranks.
    """
    check_heads(q_BHsK.shape[1], group.size)
    times = copies(k_BGsK.shape[1], group.size)
    q_BhSK = to_heads(q_BHsK, group)
    k_BgSK, v_BgSK = (to_heads(x.repeat_interleave(times, 1), group) for x in (k_BGsK, v_BGsK))
    return q_BhSK, k_BgSK, v_BgSK


def ulysses_attention(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, causal: bool, group: Group) -> Tensor:
    """Return this rank's rows of attention, [B, H, s, K]; pieces are in the order of the ranks."""
    return to_tokens(attend(*exchanged(q_BHsK, k_BGsK, v_BGsK, group), causal), group)


def train(job: Job[SequenceOptions]) -> Iterator[Tensor]:
    """Train on this rank's piece of every sequence; yield the loss of each global batch."""
    model, group = job.model, job.group
    replace_attention(model, partial(ulysses_attention, group=group), group)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # whole sequences, the same on all ranks
        pieces = batch.cut(partial(split_sequence, group=group, longest=longest_sequence(model.config)))
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


LESSON = Lesson("sp", {"ulysses": train}, step_bytes(ulysses_bytes))


def main(rt: Runtime, o: SequenceOptions) -> bool:
    """Prove equality with one device, or with --benchmark time attention alone."""
    check(rt, o, {"ulysses": "contiguous"}, inner=rt.world_size)
    if not o.benchmark:
        console(rt).print(bytes_table(o))
        return prove(rt, o, LESSON)
    group = sp_group(rt)
    case = AttentionCase(partial(ulysses_attention, group=group), ulysses_bytes, ALONE, row=group)
    return attention_benchmark(rt, o, {"ulysses": case})


if __name__ == "__main__":
    run(main, SequenceOptions, versions=LESSON.versions)
