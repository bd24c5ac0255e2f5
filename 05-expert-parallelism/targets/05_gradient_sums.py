"""Targets of the gradient sums on dp x ep: gradients of one device, the norm, bytes over each axis.

The gradients that a rank has before the sums are computed on one device, from this rank's tokens or its row's. A
target communicates first and compares afterwards. E experts, e of a rank  D width
"""

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group
from common.grade.targets import at_most, counted, exactly, same, target

E, D = 6, 3
Gradients = dict[str, Tensor]
MESHES = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2)]}  # dp, ep by the number of ranks


def split(name: str) -> bool:
    """Return True for the experts' parameters."""
    return name.startswith("experts.")


def from_tokens(x_TD: Tensor, expert_T: Tensor, weights: Gradients) -> Gradients:
    """Return all gradients from these tokens, of a mixture with a shared expert; its loss is a plain sum."""
    p = {name: w.clone().requires_grad_() for name, w in weights.items()}
    h_TD = x_TD @ p["attention.weight"]
    score_T1 = (h_TD @ p["router.weight"].T).softmax(-1).gather(1, expert_T[:, None])
    up_TD = (h_TD[:, None] @ p["experts.up.weight"][expert_T])[:, 0] + p["experts.up.bias"][expert_T]
    y_TD = score_T1 * torch.tanh(up_TD) + torch.tanh(h_TD @ p["shared_expert.weight"])
    (y_TD * (1 + x_TD)).sum().backward()
    return {name: w.grad for name, w in p.items()}


class Setting:
    """A mesh, this rank's parameters and gradients before the sums, the right ones, and typical mistakes."""

    def __init__(self, group: Group, dp: int, ep: int, rng: torch.Generator) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        weights = {
            "attention.weight": draw(D, D),
            "router.weight": draw(E, D),
            "experts.up.weight": draw(E, D, D),
            "experts.up.bias": draw(E, D),
            "shared_expert.weight": draw(D, D),
        }
        self.dp, self.ep, (d, e) = dp, ep, divmod(group.rank, ep)
        self.name = f"dp={dp} ep={ep}"
        by_rank = []
        for rank in range(group.size):
            tokens = 4 + rank % 2
            expert_T = torch.randint(0, E, (tokens,), generator=rng)
            expert_T[: 2 * E // ep] = torch.arange(tokens)[: 2 * E // ep] % E
            if dp > 1 and rank // ep == dp - 1:  # all tokens of the last row go to the first expert
                expert_T[:] = 0
            by_rank.append(from_tokens(draw(tokens, D), expert_T, weights))
        rows = {d: range(d * ep, d * ep + ep) for d in range(dp)}
        columns = {e: range(e, group.size, ep) for e in range(ep)}

        def over(ranks: range) -> Gradients:
            return {name: sum((by_rank[r][name] for r in ranks), torch.zeros(())) for name in weights}

        def mine(of: Gradients, place: int = e) -> Gradients:
            return {n: w.chunk(ep)[place].clone() if split(n) else w.clone() for n, w in of.items()}

        self.whole = over(range(group.size))
        self.right = mine(self.whole)
        self.before = {
            n: (mine(over(rows[d])) if split(n) else by_rank[group.rank])[n].clone() for n in weights
        }
        parts_ep = [mine(over(rows[d]), place) for place in range(ep)]
        everywhere = [mine(self.whole, place) for place in range(ep)]
        self.mistakes = {
            n: {
                "this row's: it was not summed over dp": self.before[n],
                "summed over ep too: gradients of different experts were added": sum(
                    p[n] for p in everywhere
                ),
                "summed over ep and not over dp: gradients of different experts were added": sum(
                    p[n] for p in parts_ep
                ),
            }
            if split(n)
            else {
                "summed over dp alone: the ranks along ep see other tokens": over(columns[e])[n],
                "summed over ep alone: the ranks along dp see other tokens": over(rows[d])[n],
                "of this rank's tokens: it was not summed": by_rank[group.rank][n],
            }
            for n in weights
        }
        self.parameters = {n: nn.Parameter(w) for n, w in mine(weights).items()}
        self.groups = {
            "dp": group.part("dp", list(columns[e])),
            "ep": group.part("ep", list(rows[d])),
            "dp+ep": group.part("dp+ep", range(group.size)),
        }

    def give(self, gradients: Gradients, unused_none: bool = False) -> None:
        """Set the parameters' gradients; unused_none: None in place of zeros, for experts without a token."""
        for name, p in self.parameters.items():
            p.grad = None if unused_none and not gradients[name].any() else gradients[name].clone()


def settings(group: Group, rng: torch.Generator) -> list[Setting]:
    """Return the settings of all meshes of this many ranks."""
    return [Setting(group, dp, ep, rng) for dp, ep in MESHES[group.size]]


def compare(s: Setting, names: list[str]) -> None:
    """Compare the gradients of these parameters."""
    for name in names:
        got, want = s.parameters[name].grad, s.right[name]
        if got is not None or want.any():
            same(f"with {s.name}, the gradient of {name}", got, want, s.mistakes[name])


def gradients_are_right(mine: Any, group: Group, rng: torch.Generator, experts: bool) -> None:
    """Sum on all meshes, then compare."""
    meshes = settings(group, rng)
    for s in meshes:
        s.give(s.before, unused_none=experts)
        mine.sum_gradients(s.parameters, s.groups)
    for s in meshes:
        compare(s, [name for name in s.parameters if split(name) == experts])


@target("dense gradients: attention, router, shared expert", ranks=(1, 2, 3, 4))
def dense(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Every rank sees other tokens."""
    gradients_are_right(mine, group, rng, experts=False)


@target("gradients of the experts, also where one rank has None and another a tensor", ranks=(1, 2, 3, 4))
def experts(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Complete along ep."""
    gradients_are_right(mine, group, rng, experts=True)


@target("the norm counts every number once", ranks=(1, 2, 3, 4))
def norm(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Of right gradients."""
    meshes = settings(group, rng)
    norms = []
    for s in meshes:
        s.give(s.right)
        norms.append(mine.gradient_norm(s.parameters, s.groups))
    for s, got in zip(meshes, norms, strict=True):
        dense2, experts2 = (
            sum(w.square().sum() for n, w in s.whole.items() if split(n) == flag) for flag in (False, True)
        )
        own2 = sum(w.square().sum() for n, w in s.right.items() if split(n))
        mistakes = {
            "that of this rank's gradients: other ranks have other experts": (dense2 + own2).sqrt(),
            "too large: it counts dense gradients on every rank, and experts once for each rank along dp": (
                (s.dp * (s.ep * dense2 + experts2)).sqrt()
            ),
            "too large: it counts dense gradients once for each rank along ep": (
                s.ep * dense2 + experts2
            ).sqrt(),
            "too large: it counts experts once for each rank along dp": (dense2 + s.dp * experts2).sqrt(),
            "not the root, but the sum of the squares": dense2 + experts2,
        }
        same(f"with {s.name}, the norm", got, (dense2 + experts2).sqrt(), mistakes)
        compare(s, list(s.parameters))


@target("bytes: dense gradients over dp x ep, experts over dp, and the norm's", ranks=(2, 3, 4))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """No gradient travels along an axis that splits it."""
    found = []
    for s in settings(group, rng):
        s.give(s.before)
        with counted("all_reduce") as sums:
            mine.sum_gradients(s.parameters, s.groups)
        with counted("all_reduce") as norm:
            mine.gradient_norm(s.parameters, s.groups)
        found.append((s, sums.bytes(), norm.bytes()))
    for s, sums_sent, norm_sent in found:
        n, share = group.size, {}
        for kind, ranks in ((False, n), (True, s.dp)):
            numbers = sum(p.numel() for name, p in s.parameters.items() if split(name) == kind)
            share[kind] = Fraction(2 * (ranks - 1), ranks) * 8 * numbers
        exactly(f"with {s.name}, bytes that sum_gradients sends", sums_sent, share[False] + share[True])
        at_most(f"with {s.name}, bytes that gradient_norm sends", norm_sent, Fraction(2 * (n - 1), n) * 16)
