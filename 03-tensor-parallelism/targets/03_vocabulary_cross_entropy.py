"""Targets of the split cross-entropy: losses, gradients, large logits, bytes, and no rank with all logits.

N tokens  V vocabulary, v of this rank
"""

from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group, sizes_of
from common.grade.targets import at_most, backpropagate, counted, exactly, same, target
from common.utils.memory import LiveBytes

N, V = 6, 11


def whole(rng: torch.Generator, tokens: int = N, vocabulary: int = V) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits_NV, targets_N and dloss_N; the first and last word of the vocabulary are among the targets."""
    logits_NV = 2 * torch.randn(tokens, vocabulary, generator=rng, dtype=torch.float64)
    targets_N = torch.randint(vocabulary, (tokens,), generator=rng)
    targets_N[:2] = torch.tensor([0, vocabulary - 1])
    dloss_N = torch.rand(tokens, generator=rng, dtype=torch.float64) + 0.5
    return logits_NV, targets_N, dloss_N


def part(x_NV: Tensor, group: Group) -> Tensor:
    """Return this rank's columns."""
    return x_NV.split(sizes_of(x_NV.shape[1], group.size), 1)[group.rank]


def begin(vocabulary: int, group: Group) -> int:
    """Return this rank's first token."""
    return sum(sizes_of(vocabulary, group.size)[: group.rank])


def losses(mine: Any, logits_NV: Tensor, targets_N: Tensor, group: Group) -> Tensor:
    """Return what the exercise says."""
    first = begin(logits_NV.shape[1], group)
    return mine.cross_entropy(part(logits_NV, group).clone(), targets_N.clone(), first, group)


@target("the loss of each token", ranks=(1, 2, 3))
def values(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Ordinary logits, in uneven parts."""
    logits_NV, targets_N, _ = whole(rng)
    loss_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
    at_target_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
    parts = logits_NV.split(sizes_of(V, group.size), 1)
    owner_N = torch.tensor([r for r, p in enumerate(parts) for _ in range(p.shape[1])])[targets_N]
    m_RN = torch.stack([p.amax(1) for p in parts])
    sum_N = torch.stack([(p - m[:, None]).exp().sum(1) for p, m in zip(parts, m_RN, strict=True)]).sum(0)
    own_m_N = m_RN[owner_N, torch.arange(N)]
    own_sum_N = parts[group.rank].logsumexp(1)
    mistakes = {
        "computed with the sum of exponentials of this rank's columns alone": own_sum_N - at_target_N,
        "log of the sum alone: the logit of the target is missing": loss_N + at_target_N,
        "computed with each rank's own maximum for m": sum_N.log() - (at_target_N - own_m_N),
        "negative: the sign is wrong": -loss_N,
    }
    same("the loss", losses(mine, logits_NV, targets_N, group), loss_N, mistakes)


@target("the loss of logits of a thousand", ranks=(1, 3))
def large(mine: Any, group: Group, rng: torch.Generator) -> None:
    """One rank's columns are much larger than all others', then much smaller."""
    for far in (1000.0, -1000.0):
        logits_NV, targets_N, _ = whole(rng)
        logits_NV[:, : V // 2] += far
        want = F.cross_entropy(logits_NV, targets_N, reduction="none")
        same(
            f"the loss where half of the logits are about {far:.0f}",
            losses(mine, logits_NV, targets_N, group),
            want,
        )


@target("the gradient of this rank's logits", ranks=(1, 2, 3))
def gradients(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Each token's loss with another gradient; targets on all ranks."""
    logits_NV, targets_N, dloss_N = whole(rng)
    logits_NV.requires_grad_()
    F.cross_entropy(logits_NV, targets_N, reduction="none").backward(dloss_N)
    softmax_NV = logits_NV.detach().softmax(1)
    own_Nv = part(logits_NV, group).detach().clone().requires_grad_()
    first = begin(V, group)
    backpropagate("the loss", mine.cross_entropy(own_Nv, targets_N, first, group), dloss_N.clone())
    inside_N = (targets_N >= first) & (targets_N < first + own_Nv.shape[1])
    everywhere_Nv = F.one_hot(torch.where(inside_N, targets_N - first, 0), own_Nv.shape[1])
    mistakes = {
        "softmax alone: 1 is to be subtracted at the target": part(softmax_NV * dloss_N[:, None], group),
        "right for a gradient of 1 of each loss: multiply by dloss_N": part(
            softmax_NV - F.one_hot(targets_N, V), group
        ),
        "wrong where the target is another rank's: 1 was subtracted in this rank's columns": (
            part(softmax_NV, group) - everywhere_Nv
        )
        * dloss_N[:, None],
        "computed with the softmax over this rank's columns alone": (
            own_Nv.detach().softmax(1) - part(F.one_hot(targets_N, V), group)
        )
        * dloss_N[:, None],
    }
    same("the gradient of the logits", own_Nv.grad, part(logits_NV.grad, group), mistakes)


@target("3 N numbers forward, nothing backward", ranks=(2, 3))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """All-reduces alone."""
    logits_NV, targets_N, dloss_N = whole(rng)
    own_Nv, n = part(logits_NV, group).clone().requires_grad_(), group.size
    with counted("all_reduce") as forward:
        loss_N = mine.cross_entropy(own_Nv, targets_N, begin(V, group), group)
    with counted("all_reduce") as backward:
        backpropagate("the loss", loss_N, dloss_N)
    at_most("bytes that it sends in the forward pass", forward.bytes(), Fraction(2 * (n - 1) * 3 * N * 8, n))
    exactly("bytes that it sends in the backward pass", backward.bytes(), 0)


@target("no rank holds all logits", ranks=(4,))
def memory(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Storages alive at once in both passes: N v numbers each for softmax, gradient and two more; 16 per token."""
    logits_NV, targets_N, dloss_N = whole(rng, 32, 1024)
    own_Nv = part(logits_NV, group).clone().requires_grad_()
    with LiveBytes() as live:
        backpropagate("the loss", mine.cross_entropy(own_Nv, targets_N, begin(1024, group), group), dloss_N)
    at_most("bytes at the peak of both passes", live.peak, 8 * (4 * own_Nv.numel() + 16 * 32))
