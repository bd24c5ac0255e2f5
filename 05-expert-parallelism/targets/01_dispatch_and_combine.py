"""Targets of dispatch and combine: order, positions, equality with a loop over all experts, memory.

T tokens  K experts per token  E experts  R = T K rows  D width
"""

from typing import Any

import torch
from torch import Tensor

from common.comm import Group
from common.grade.targets import at_most, backpropagate, holds, same, target
from common.utils.memory import LiveBytes

SIZES = ((3, 2, 3), (7, 1, 4), (9, 3, 5), (1, 2, 6))  # T, K, E


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def choices(rng: torch.Generator, T: int, K: int, E: int) -> Tensor:
    """Return K different experts per token; the last expert gets no token where there are enough others."""
    return draw(rng, T, E - (E > K)).argsort(1)[:, :K].contiguous()


def right(experts_TK: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token of each row, rows per expert and the row of each choice, by loops."""
    T, K = experts_TK.shape
    pairs = sorted((int(experts_TK[t, k]), t, k) for t in range(T) for k in range(K))
    row_TK = torch.empty(T, K, dtype=torch.int64)
    for i, (_, t, k) in enumerate(pairs):
        row_TK[t, k] = i
    counts = [sum(e == expert for expert, *_ in pairs) for e in range(E)]
    return torch.tensor([t for _, t, _ in pairs]), torch.tensor(counts), row_TK


@target("rows sorted by expert, in the order of the tokens, and their counts")
def order(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The example of the text, K = 1, experts without a token, one token."""
    for T, K, E in SIZES:
        experts_TK = choices(rng, T, K, E) if T > 3 else torch.tensor([[1, 2], [0, 2], [2, 0]][:T])
        x_TD = draw(rng, T, 5)
        token_R, counts_E, _ = right(experts_TK, E)
        result = mine.dispatch(x_TD.clone(), experts_TK.clone(), E)
        holds(isinstance(result, tuple) and len(result) == 3, "dispatch returns three tensors, as a tuple")
        by_choice_R = experts_TK.T.flatten().argsort(stable=True) % T
        mistakes = {
            "in the order of the tokens: it is not sorted by expert": x_TD.repeat_interleave(K, 0),
            "sorted by expert, but with all first choices before the second ones": x_TD[by_choice_R],
        }
        case = f"for T, K, E = {T}, {K}, {E}"
        same(f"rows_RD {case}", result[0], x_TD[token_R], mistakes)
        same(f"counts_E {case}", result[1], counts_E)


@target("row_TK holds the row of each choice")
def positions(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The inverse of the sort."""
    for T, K, E in SIZES[1:]:
        experts_TK = choices(rng, T, K, E)
        *_, row_TK = right(experts_TK, E)
        mistakes = {
            "the inverse of the right one: it holds the choice of each row": (
                row_TK.flatten().argsort().view(T, K)
            ),
            "the numbers in order: the sort is not undone": torch.arange(T * K).view(T, K),
        }
        result = mine.dispatch(draw(rng, T, 5), experts_TK.clone(), E)
        same(f"row_TK for T, K, E = {T}, {K}, {E}", result[2], row_TK, mistakes)


@target("combine weighs a token's results and adds them")
def weighted(mine: Any, group: Group, rng: torch.Generator) -> None:
    """With the right rows."""
    for T, K, E in SIZES[1:]:
        _, _, row_TK = right(choices(rng, T, K, E), E)
        y_RD, weights_TK = draw(rng, T * K, 5), draw(rng, T, K)
        early_RD = y_RD * weights_TK.flatten()[:, None]
        mistakes = {
            "the sum without the weights": y_RD[row_TK].sum(1),
            "weighted before the results were back in the order of the choices": early_RD[row_TK].sum(1),
        }
        want = (y_RD[row_TK] * weights_TK[..., None]).sum(1)
        got = mine.combine(y_RD.clone(), row_TK.clone(), weights_TK.clone())
        same(f"y_TD of combine for T, K = {T}, {K}", got, want, mistakes)


@target("values and gradients of a loop over all experts")
def dense_loop(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Experts are tanh(x W); every one computes all tokens, with weight 0 where it was not chosen."""
    for T, K, E in SIZES:
        experts_TK, dy_TD = choices(rng, T, K, E), draw(rng, T, 5)
        x_TD, w_EDD, weights_TK = draw(rng, T, 5), draw(rng, E, 5, 5), draw(rng, T, K)
        theirs = [x.clone().requires_grad_() for x in (x_TD, w_EDD, weights_TK)]
        whole_TE = torch.zeros(T, E, dtype=torch.float64).scatter(1, experts_TK, theirs[2])
        want = torch.stack([torch.tanh(theirs[0] @ w) * whole_TE[:, [e]] for e, w in enumerate(theirs[1])])
        want.sum(0).backward(dy_TD)
        own = [x.clone().requires_grad_() for x in (x_TD, w_EDD, weights_TK)]
        rows_RD, counts_E, row_TK = mine.dispatch(own[0], experts_TK.clone(), E)
        pieces = zip(rows_RD.split(counts_E.tolist()), own[1], strict=True)
        got = mine.combine(torch.cat([torch.tanh(x @ w) for x, w in pieces]), row_TK, own[2])
        same("y_TD through dispatch, experts and combine", got, want.sum(0))
        backpropagate("y_TD", got, dy_TD)
        for name, a, b in zip(("x", "the experts", "the weights"), own, theirs, strict=True):
            same(f"the gradient of {name} for T, K, E = {T}, {K}, {E}", a.grad, b.grad)


@target("memory of the rows, not of one-hot matrices")
def memory(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Live at once, in float64; some further integers per row are allowed."""
    T, K, E, D = 200, 2, 8, 32
    experts_TK, weights_TK, x_TD = choices(rng, T, K, E), draw(rng, T, K), draw(rng, T, D)
    rows, integers = T * K * D * 8, 10 * T * K * 8
    with LiveBytes() as live:
        result = mine.dispatch(x_TD, experts_TK, E)
    at_most("bytes that dispatch holds at once", live.peak, 2 * rows + integers)
    with LiveBytes() as live:
        mine.combine(result[0], result[2], weights_TK)
    at_most("bytes that combine holds at once", live.peak, 3 * rows + integers)
