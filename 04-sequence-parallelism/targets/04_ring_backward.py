"""Targets of ring attention's backward pass: gradients against one device, saved tensors, blocks sent, memory.

B batch  H heads  s tokens of a rank  K width of a head  R ranks  2: keys, values
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group
from common.grade.targets import at_most, backpropagate, counted, exactly, same, target
from common.utils.memory import LiveBytes


@dataclass
class Whole:
    """Attention of all ranks' queries to all ranks' keys on one device, with the terms of each pair of ranks."""

    q: Tensor  # RBHsK
    kv: Tensor  # R2BHsK
    do: Tensor  # RBHsK
    o: Tensor  # RBHsK
    dq: Tensor  # RRBHsK: rank of the queries, rank of the keys
    dkv: Tensor  # RR2BHsK: likewise


def whole(n: int, rng: torch.Generator, shape: tuple[int, ...] = (2, 3, 4, 5)) -> Whole:
    """Return random inputs, and their attention and gradients: autograd's for copies of the keys, one per rank."""
    q, do = (torch.randn(n, *shape, generator=rng, dtype=torch.float64) for _ in range(2))
    kv = torch.randn(n, 2, *shape, generator=rng, dtype=torch.float64)
    q_RR = q[:, None].expand(n, n, *shape).clone().requires_grad_()
    kv_RR = kv[None].expand(n, n, 2, *shape).clone().requires_grad_()
    scores = [
        torch.cat([q_RR[r, j] @ kv_RR[r, j, 0].mT for j in range(n)], -1) / math.sqrt(shape[-1])
        for r in range(n)
    ]
    o = torch.stack([scores[r].softmax(-1) @ torch.cat(kv_RR[r, :, 1].unbind(), -2) for r in range(n)])
    o.backward(do)
    return Whole(q, kv, do, o.detach(), q_RR.grad, kv_RR.grad)


def own(all_of: Whole, group: Group) -> tuple[Tensor, Tensor]:
    """Return this rank's leaves q and kv."""
    return tuple(x[group.rank].clone().requires_grad_() for x in (all_of.q, all_of.kv))


@target("o and dq are those of one device", ranks=(1, 2, 3, 4))
def queries(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The terms of all blocks of keys, each with the keys of its rank."""
    all_of, r, n = whole(group.size, rng), group.rank, group.size
    q, kv = own(all_of, group)
    o = mine.ring_attention(q, kv, group)
    same("o", o, all_of.o[r])
    backpropagate("o", o, all_of.do[r].clone())
    terms = all_of.dq[r]
    mistakes = {
        "the term of this rank's own keys alone": terms[r],
        "that of the keys that came last alone; the terms are to be added": terms[(r + 1) % n],
        "computed with this rank's own keys in every step: after each message use the keys that came": n
        * terms[r],
        "without the term of this rank's own keys": terms.sum(0) - terms[r],
        "without the term of the keys that came last": terms.sum(0) - terms[(r + 1) % n],
    }
    alone = all_of.q[r].clone().requires_grad_()
    for k, v in all_of.kv:
        F.scaled_dot_product_attention(alone, k, v).backward(all_of.do[r])
    mistakes["computed with each block's own o and lse: those of all keys are needed"] = alone.grad
    same("dq", q.grad, terms.sum(0), mistakes if n > 1 else {})


@target("dkv is that of one device", ranks=(1, 2, 3, 4))
def keys(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The terms of all ranks' queries, on the rank of the keys."""
    all_of, r, n = whole(group.size, rng), group.rank, group.size
    q, kv = own(all_of, group)
    backpropagate("o", mine.ring_attention(q, kv, group), all_of.do[r].clone())
    every = all_of.dkv.sum(0)
    terms = all_of.dkv[:, r]
    mistakes = {
        "the term of this rank's own queries alone: what the other ranks added has not come home": terms[r],
        "without the term of this rank's own queries": every[r] - terms[r],
        "the term of the left neighbour's queries and its own alone: a dkv that comes must be added to, not replaced": (
            terms[r - 1] + terms[r]
        ),
        "that of the left neighbour's keys: dkv is one message short of home": every[r - 1],
        "that of the right neighbour's keys: dkv went one message too far": every[(r + 1) % n],
        "the sum of this rank's terms for the keys of all ranks: dkv has not travelled": all_of.dkv[r].sum(0),
    }
    same("dkv", kv.grad, every[r], mistakes if n > 1 else {})


@target("a second backward pass gives the same: saved tensors are unchanged", ranks=(3,))
def twice(mine: Any, group: Group, rng: torch.Generator) -> None:
    """retain_graph=True; the gradients and do of the first pass are not changed either."""
    all_of = whole(group.size, rng)
    q, kv = own(all_of, group)
    do, before = all_of.do[group.rank].clone(), kv.detach().clone()
    o = mine.ring_attention(q, kv, group)
    passes = [torch.autograd.grad(o, (q, kv), do, retain_graph=True) for _ in range(2)]
    same("kv after the backward pass", kv, before)
    same("do after the backward pass", do, all_of.do[group.rank])
    for name, one, two in zip(("dq", "dkv"), *passes, strict=True):
        same(f"{name} of a second backward pass", two, one)


@target("n-1 blocks forward, 2(n-1) backward", ranks=(1, 2, 3, 4))
def blocks_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Messages alone, in blocks of keys and values."""
    all_of, n = whole(group.size, rng), group.size
    q, kv = own(all_of, group)
    with counted("send", "recv") as forward:
        o = mine.ring_attention(q, kv, group)
    with counted("send", "recv") as backward:
        backpropagate("o", o, all_of.do[group.rank])
    exactly("blocks that it sends in the forward pass", Fraction(forward.bytes(), kv.nbytes), n - 1)
    exactly("blocks that it sends in the backward pass", Fraction(backward.bytes(), kv.nbytes), 2 * (n - 1))


@target("two buffers each for kv and dkv, for any number of ranks", ranks=(6,))
def memory(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Three ranks and six; scores are small beside a block: 2 tokens per rank, heads 64 wide."""
    first = group.rank // 3 * 3
    three = group.part("three", range(first, first + 3))
    blocks = []
    for ranks in (three, group):
        all_of = whole(ranks.size, rng, (2, 1, 2, 64))
        q, kv = own(all_of, ranks)
        with LiveBytes() as live:
            o = mine.ring_attention(q, kv, ranks)
            backpropagate("o", o, all_of.do[ranks.rank])
        blocks.append(live.peak / kv.nbytes)
    at_most("blocks of keys and values alive at once", blocks[1], 11)
    at_most("blocks alive at once that 6 ranks add to those of 3", blocks[1] - blocks[0], 1)
