r"""Sequence parallelism, the simple way: every rank holds a piece of the sequence and gathers all keys and values.

    rank r's rows of attention  =  softmax(q_r k^T / sqrt(K)) v          k = [k_0 k_1 ... ], v likewise, from all ranks

                     rank 0              rank 1              rank 2
    tokens           0 1 2 3             4 5 6 7             8 9 10 11
    q, k, v          own tokens          own tokens          own tokens
                        \_________ all-gather of k and v _______/
    attention        q_0 with 0..3       q_1 with 0..7       q_2 with 0..11      (causal: uneven work)
    backward            \____ reduce-scatter of dk and dv ______/     each rank has a part of every key's gradient
    the rest         norms, projections, MLP, head, loss: one token at a time, no communication

The adjoint of the gather is a reduce-scatter, since the gradient of a gathered key is partial: the queries of each rank
add their part. Weights are on all ranks, and their gradients are summed over sp by the rule of placement.py.

Cost: a layer sends 2(n-1) times a rank's keys and values, 2 * 2(n-1) B s G K numbers. Memory: activations
fall as 1/n, but the gathered keys and values, 2 B S G K numbers a layer, do not. Results equal those of one
device.

    python sp_basic.py --nproc 4      torchrun --nproc_per_node=4 sp_basic.py      mpirun -np 4 python sp_basic.py

B batch  S sequence  s = S / n, a rank's tokens  T tokens that its queries see  H query heads  G key-value heads
K width of a head
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group, collectives
from common.comm.placement import sum_gradients
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_costs import allgather_bytes, step_bytes
from sp_split import longest_sequence, split_sequence
from sp_training import SequenceOptions, check, replace_attention, sp_group


def gathered_attention(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, causal: bool, group: Group) -> Tensor:
    """Return this rank's rows of attention, [B, H, s, K]; pieces are in the order of the ranks.

    Keys later than all of this rank's queries are dropped before the product; the mask hides later keys in
    its own piece.
    """
    k_BGTK = collectives.gather(k_BGsK, group, 2, gradient="partial")
    v_BGTK = collectives.gather(v_BGsK, group, 2, gradient="partial")
    s, seen_sT = q_BHsK.shape[2], None
    if causal:
        before = group.rank * s
        k_BGTK, v_BGTK = k_BGTK[:, :, : before + s], v_BGTK[:, :, : before + s]
        seen_sT = torch.ones(s, before + s, dtype=torch.bool, device=q_BHsK.device).tril(before)
    grouped = q_BHsK.shape[1] != k_BGTK.shape[1]
    return F.scaled_dot_product_attention(q_BHsK, k_BGTK, v_BGTK, attn_mask=seen_sT, enable_gqa=grouped)


def train(job: Job[SequenceOptions]) -> Iterator[Tensor]:
    """Train on this rank's piece of every sequence; yield the loss of each global batch."""
    model, group = job.model, job.group
    replace_attention(model, partial(gathered_attention, group=group), group)
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


LESSON = Lesson("sp", {"allgather": train}, step_bytes(allgather_bytes))


def main(rt: Runtime, o: SequenceOptions) -> bool:
    """Prove equality with one device, or with --benchmark time attention alone."""
    check(rt, o, {"allgather": "contiguous"})
    if not o.benchmark:
        return prove(rt, o, LESSON)
    group = sp_group(rt)
    case = AttentionCase(partial(gathered_attention, group=group), allgather_bytes, group)
    return attention_benchmark(rt, o, {"allgather": case})


if __name__ == "__main__":
    run(main, SequenceOptions, versions=LESSON.versions)
