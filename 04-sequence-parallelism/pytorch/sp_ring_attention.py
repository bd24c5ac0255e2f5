"""Ring attention: queries stay; each block of keys and values is sent on round the ring while it is used.

    o, lse  =  merged over the blocks of keys (sp_block.py); backward, dk and dv travel after their keys

    step        rank 0           rank 1           rank 2           rank 3
    0           q0 with kv0      q1 with kv1      q2 with kv2      q3 with kv3      kv of step 1 in flight
    1           q0 with kv3      q1 with kv0      q2 with kv1      q3 with kv2      kv of step 2 in flight
    2           q0 with kv2      q1 with kv3      q2 with kv0      q3 with kv1
    3           q0 with kv1      q1 with kv2      q2 with kv3      q3 with kv0
    home        backward: dkv_r with the shares of all other ranks returns to rank r, which adds its own

Causal, in contiguous order, rank r works in r + 1 of n steps, and all wait for the last rank. In zigzag order rank r
holds chunks r and 2n-1-r of 2n (sp_split.py), and each step but the first is half a block on every rank:

    owner of the keys before r      all queries, its early half of the keys       nothing is masked
    owner after r                   late half of the queries, all its keys        nothing is masked
    r itself                        all of its own, causal

Cost: a layer sends (n-1) times a rank's keys and values forward and 2(n-1) times backward: 3(n-1) 2 B s G K numbers.
Memory: two blocks of keys and values forward, two more of their gradients backward, whatever n; autograd keeps what one
device would keep of s tokens. Liu et al., "Ring attention with blockwise Transformers", arXiv:2310.01889; zigzag is
Llama 3's order (arXiv:2407.21783, section 3.3.2).

    python sp_ring_attention.py --nproc 4                   torchrun --nproc_per_node=4 sp_ring_attention.py
    mpirun -np 4 python sp_ring_attention.py --model llama-tiny --kernel hand
    mpirun -np 2 --bind-to core python sp_ring_attention.py --benchmark --dtype float32

B batch  s a rank's tokens  H query heads  G key-value heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.placement import sum_gradients
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

from sp_attention_benchmark import AttentionCase, Timed, attention_benchmark
from sp_block import Block, Kernel, block, merge_
from sp_costs import ring_bytes, step_bytes
from sp_split import Order, longest_sequence, split_sequence
from sp_training import SequenceOptions, check, replace_attention, sp_group

ORDERS: dict[str, Order] = {"ring": "contiguous", "zigzag": "zigzag"}
ALL = slice(None)


@dataclass(frozen=True)
class Work:
    """Computation with the keys of one owner: slices of the queries and of the keys, masked or not."""

    queries: slice
    keys: slice
    causal: bool = False


def work(order: Order, causal: bool, rank: int, owner: int, s: int) -> Work | None:
    """Return the work of `rank` with the keys of `owner`, None if it sees none. Zigzag needs an even `s`."""
    if not causal or owner == rank:
        return Work(ALL, ALL, causal)
    if order == "contiguous":
        return Work(ALL, ALL) if owner < rank else None
    return Work(ALL, slice(s // 2)) if owner < rank else Work(slice(s // 2, None), ALL)


class Passing:
    """Two tensors in flight: `x` to the next rank, `into` from the previous; change neither before `wait`."""

    def __init__(self, x: Tensor, into: Tensor, group: Group, tag: int) -> None:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self.sent, self.into = x, into
        self.under_way = comm.exchange(x, into, group, after, before, tag, async_op=True)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for both; return (received tensor, reusable send buffer)."""
        self.under_way.wait()
        return self.into, self.sent


class RingAttention(torch.autograd.Function):
    """Autograd function (q_BHsK, k_BGsK, v_BGsK) -> o_BHsK."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: Group, order: Order, kernel: Block
    ) -> Tensor:
        """Start with own keys: each query sees itself among them, so no sum of exponentials begins at 0."""
        n, r, s = group.size, group.rank, q.shape[2]
        kv = torch.stack((k, v))  # one message
        spare = torch.empty_like(kv) if n > 1 else kv
        for t in range(n):
            passing = Passing(kv, spare, group, tag=0) if t < n - 1 else None
            item = work(order, causal, r, (r - t) % n, s)
            if t == 0:
                o, lse = kernel.forward(q, k, v, causal)
                o = o.to(torch.promote_types(o.dtype, torch.float32))
            elif item:
                keys, values = kv[:, :, :, item.keys]
                more, more_lse = kernel.forward(q[:, :, item.queries], keys, values, item.causal)
                merge_(o[:, :, item.queries], lse[:, :, item.queries], more, more_lse)
                del more
            if passing:
                kv, spare = passing.wait()
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = causal, group, order, kernel
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Send the keys round again. Own dk and dv stay; those of others get this rank's share, travel on."""
        (q, k, v, o, lse), (causal, group, order, kernel) = ctx.saved_tensors, ctx.rest
        (do,) = gradients
        n, r, s = group.size, group.rank, q.shape[2]
        kv = torch.stack((k, v))
        spare, dkv, dkv_spare = (torch.empty_like(kv) if n > 1 else kv for _ in range(3))
        homeward: Passing | None = None
        for t in range(n):
            passing = Passing(kv, spare, group, tag=0) if t < n - 1 else None
            item = work(order, causal, r, (r - t) % n, s)
            if item:
                mine = (x[:, :, item.queries] for x in (do, q, o, lse))
                more, dk, dv = kernel.backward(*mine, *kv[:, :, :, item.keys], item.causal)
            if t == 0:
                dq, own_dk, own_dv = more, dk, dv
            else:
                dkv, dkv_spare = homeward.wait() if homeward else (dkv.zero_(), dkv_spare)
                if item:
                    dq[:, :, item.queries] += more
                    dkv[0, :, :, item.keys] += dk
                    dkv[1, :, :, item.keys] += dv
                    del more, dk, dv  # before the next block's are made
                homeward = Passing(dkv, dkv_spare, group, tag=1)
            if passing:
                kv, spare = passing.wait()
        if homeward:
            from_others, _ = homeward.wait()
            own_dk += from_others[0]
            own_dv += from_others[1]
        return dq, own_dk, own_dv, None, None, None, None


def ring_attention(
    q_BHsK: Tensor,
    k_BGsK: Tensor,
    v_BGsK: Tensor,
    causal: bool,
    group: Group,
    order: Order = "contiguous",
    kernel: Kernel | Block = "library",
) -> Tensor:
    """Return this rank's rows of attention, [B, H, s, K]; the sequence is cut by `sp_split.places`.

    Raises ValueError for zigzag with an odd s, UsageError where the kernel cannot run.
    """
    if order == "zigzag" and q_BHsK.shape[2] % 2:
        raise ValueError(f"zigzag: a rank's {q_BHsK.shape[2]} tokens are not two chunks")
    chosen = kernel if isinstance(kernel, Block) else block(kernel, q_BHsK.device)
    return cast(Tensor, RingAttention.apply(q_BHsK, k_BGsK, v_BGsK, causal, group, order, chosen))


def train(job: Job[SequenceOptions]) -> Iterator[Tensor]:
    """Train on this rank's tokens of every sequence; yield the loss of each global batch."""
    model, group, order = job.model, job.group, ORDERS[job.version]
    attend = partial(ring_attention, group=group, order=order, kernel=job.options.kernel)
    replace_attention(model, attend, group)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # whole sequences, the same on all ranks
        pieces = batch.cut(
            partial(split_sequence, group=group, order=order, longest=longest_sequence(model.config))
        )
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


def messages(qkv: list[Tensor], group: Group) -> None:
    """Send the messages of a forward and backward pass, without any computation."""
    kv = torch.stack((qkv[1], qkv[2]))
    spare = torch.empty_like(kv)
    for _ in range(3 * (group.size - 1)):
        Passing(kv, spare, group, tag=0).wait()


LESSON = Lesson("sp", dict.fromkeys(ORDERS, train), step_bytes(ring_bytes))


def main(rt: Runtime, o: SequenceOptions) -> bool:
    """Prove equality with one device, or with --benchmark time attention alone."""
    check(rt, o, ORDERS)
    if not o.benchmark:
        return prove(rt, o, LESSON)
    group, cases = sp_group(rt), {}
    for name in o.versions:
        kernel = Timed(block(o.kernel, rt.device))
        attend = partial(ring_attention, group=group, order=ORDERS[name], kernel=kernel.block)
        alone = partial(messages, group=group)
        cases[name] = AttentionCase(attend, ring_bytes, group, ORDERS[name], messages=alone, kernel=kernel)
    return attention_benchmark(rt, o, cases)


if __name__ == "__main__":
    run(main, SequenceOptions, versions=LESSON.versions)
