"""Targets of the global balance loss: value and gradient of one device that sees all tokens, and one small message.

A target communicates first and compares afterwards. T tokens  E experts  K choices per token
"""

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group
from common.grade.targets import Wrong, at_most, backpropagate, counted, exactly, same, target

E, K = 5, 2
Part = tuple[Tensor, Tensor]  # scores_TE, experts_TK


def batches(group: Group, rng: torch.Generator) -> list[list[Part]]:
    """Return the parts of every rank: three micro-batches, uneven, some empty; scores favour other experts each."""
    ranks = []
    for rank in range(group.size):
        parts = []
        for tokens in torch.randint(2, 6, (3,), generator=rng).tolist():
            tokens = 0 if rank == 1 and len(parts) == 2 else tokens
            logits_TE = torch.randn(tokens, E, generator=rng, dtype=torch.float64)
            logits_TE[:, (rank + len(parts)) % E] += 2
            scores_TE = logits_TE.softmax(-1)
            parts.append((scores_TE.requires_grad_(), scores_TE.topk(K).indices))
        ranks.append(parts)
    return ranks


def loss_of(parts: list[Part], f_type: torch.dtype = torch.float64) -> Tensor:
    """Return E sum_e f_e P_e of these tokens."""
    scores_TE, experts_TK = (torch.cat(both) for both in zip(*parts, strict=True))
    experts = scores_TE.shape[1]
    f_E = torch.bincount(experts_TK.flatten(), minlength=experts).to(f_type) / experts_TK.numel()
    return experts * (f_E * scores_TE.mean(0)).sum()


def flat(ranks: list[list[Part]]) -> list[Part]:
    """Return the micro-batches of all ranks."""
    return [part for parts in ranks for part in parts]


def added_up(part: object, group: Group) -> object:
    """Return the sum of the ranks' parts; what is no number is returned as it is."""
    if not isinstance(part, Tensor) or part.shape != () or part.dtype != torch.float64:
        mine: Tensor = torch.full((), torch.nan, dtype=torch.float64)
    else:
        mine = part.detach().clone()
    comm.all_reduce(mine, group)
    return part if mine.isnan() else mine


def total_mistakes(ranks: list[list[Part]]) -> dict[str, Tensor]:
    """Return what the ranks' parts add up to in typical mistakes."""
    n, each = len(ranks), [len(torch.cat([s for s, _ in parts])) for parts in ranks]
    locally = torch.stack([loss_of(parts) for parts in ranks])
    tokens = torch.tensor(each).double()
    small = torch.stack([loss_of([part]) for part in flat(ranks) if len(part[0])])
    whole = loss_of(flat(ranks))
    return {
        "the sum of the losses of the ranks' own tokens": locally.sum(),
        "the mean of the losses of the ranks' own tokens: the mean of products": locally.mean(),
        "the mean of the losses of the ranks' own tokens, weighted by tokens: f is of this rank alone": (
            (locally * tokens).sum() / tokens.sum()
        ),
        "the sum of the micro-batches' own losses": small.sum(),
        "the whole loss from every rank: return this rank's part": n * whole,
        "the right loss to 7 digits: f is in float32": loss_of(flat(ranks), torch.float32),
    }


@target("the example: even load over two ranks", ranks=(2,))
def example(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Two tokens a rank, of which each sees only one expert chosen."""
    rows = [[0.75, 0.25], [0.25, 0.75]]
    ranks = [
        [(torch.tensor([row, row], dtype=torch.float64), torch.tensor([[r], [r]]))]
        for r, row in enumerate(rows)
    ]
    got = added_up(mine.balance_loss(ranks[group.rank], group), group)
    same("the sum of both ranks' parts in the example", got, loss_of(flat(ranks)), total_mistakes(ranks))


@target("the loss of all tokens", ranks=(1, 2, 3, 4))
def value(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Uneven parts, three micro-batches."""
    ranks = batches(group, rng)
    got = added_up(mine.balance_loss(ranks[group.rank], group), group)
    same("the sum of all ranks' parts", got, loss_of(flat(ranks)).detach(), total_mistakes(ranks))


@target("the gradient of the scores", ranks=(1, 2, 3, 4))
def gradient(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Of each micro-batch; f is that of all ranks."""
    ranks = batches(group, rng)
    own = [(s.detach().clone().requires_grad_(), e) for s, e in ranks[group.rank]]
    part = mine.balance_loss(own, group)
    backpropagate("the loss", part, torch.ones((), dtype=torch.float64))
    loss_of(flat(ranks)).backward()
    local = [(s.detach().clone().requires_grad_(), e) for s, e in ranks[group.rank]]
    loss_of(local).backward()
    for number, ((got, _), (want, _), (alone, _)) in enumerate(
        zip(own, ranks[group.rank], local, strict=True)
    ):
        mistakes = {"that of the loss of this rank's own tokens": alone.grad}
        same(f"the gradient of the scores of micro-batch {number}", got.grad, want.grad, mistakes)


@target("one all-reduce of E integers", ranks=(2, 4))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Neither scores nor gradients travel."""
    ranks = batches(group, rng)
    with counted("all_reduce") as forward:
        part = mine.balance_loss(ranks[group.rank], group)
    with counted() as backward:
        backpropagate("the loss", part, torch.ones((), dtype=torch.float64))
    exactly("calls of comm.all_reduce", len(forward.rows), 1)
    limit = Fraction(2 * (group.size - 1), group.size) * 8 * E
    at_most("bytes that it sends", forward.bytes(), limit)
    if backward.rows:
        raise Wrong("its backward pass communicates; the counts have no gradient")
