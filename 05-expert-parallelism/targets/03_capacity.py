"""Targets of the capacity: slots by a loop over choices, on 1, 2 and 4 ranks; rows, results and gradients.

B sequences of S tokens, b of a rank  K experts per token  E experts  C slots  D width
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, sizes_of
from common.grade.targets import backpropagate, counted, exactly, same, target

B, S, K, E, C, D = 7, 6, 2, 4, 2, 3  # some choices are dropped, some slots are empty


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def choices(rng: torch.Generator) -> Tensor:
    """Return experts_BSK, for each token different ones; expert 0 is popular, and the last one seldom chosen."""
    return (
        (draw(rng, B, S, E) + 2.0 * torch.arange(E - 1, -1, -1))
        .argsort(-1, descending=True)[..., :K]
        .contiguous()
    )


def right(experts_BSK: Tensor, capacity: int = C, order: str = "bsk", queue: str = "b") -> Tensor:
    """Return slot_BSK by a loop over the choices in this order; one queue per expert and index `queue`."""
    slot_BSK, taken = torch.empty_like(experts_BSK), Counter[tuple[int, int]]()
    places = (experts_BSK >= 0).nonzero().tolist()
    for place in sorted(places, key=lambda bsk: [bsk["bsk".index(i)] for i in order]):
        key = (int(experts_BSK[tuple(place)]), place[0] if queue else 0)
        slot_BSK[tuple(place)] = taken[key] if taken[key] < capacity else -1
        taken[key] += 1
    return slot_BSK


def own(x_B: Tensor, group: Group) -> Tensor:
    """Return this rank's sequences."""
    return x_B.split(sizes_of(B, group.size))[group.rank].clone()


@target("the capacity")
def capacity(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Rounded up, of the choices and not of the tokens."""
    for S, K, E, c, want in ((4, 1, 2, 1.0, 2), (32, 1, 8, 1.25, 5), (32, 2, 8, 1.25, 10), (6, 2, 8, 0.5, 1)):
        exactly(f"capacity({S}, {K}, {E}, {c})", mine.capacity(S, K, E, c), want)


@target("slots of one sequence")
def one_sequence(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The example of the text, and K = 2."""
    example_BSK = torch.tensor([1, 1, 0, 1]).view(1, 4, 1)
    got = mine.slots(example_BSK.clone(), 2, 2)
    mistakes = {"counted from 1, not from 0": torch.tensor([1, -1, 1, -1]).view(1, 4, 1)}
    same("slot_BSK of the example", got, torch.tensor([0, 1, 0, -1]).view(1, 4, 1), mistakes)
    experts_BSK = choices(rng)[:1]
    mistakes = {
        "without a limit: choices over the capacity are dropped": right(experts_BSK, 10**6),
        "that of a queue with all first choices before the second ones; positions come first": right(
            experts_BSK, order="bks"
        ),
    }
    same(
        "slot_BSK of one sequence, K = 2", mine.slots(experts_BSK.clone(), E, C), right(experts_BSK), mistakes
    )


@target("the same slots on 1, 2 and 4 ranks, without communication", ranks=(1, 2, 4))
def on_ranks(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Seven sequences, uneven on the ranks."""
    whole_BSK = choices(rng)
    own_bSK = own(whole_BSK, group)
    with counted():
        got = mine.slots(own_bSK.clone(), E, C)
    mistakes = {
        "that of one queue for all sequences of the rank: what is dropped depends on the number of ranks": (
            right(own_bSK, C, queue="")
        ),
        "that of one queue for all sequences of the rank, with all their slots": (
            right(own_bSK, C * len(own_bSK), queue="")
        ),
    }
    same("slot_BSK of this rank's sequences", got, own(right(whole_BSK), group), mistakes)


@target("later tokens change no slot")
def causal(mine: Any, group: Group, rng: torch.Generator) -> None:
    """A model that generates text does not know them."""
    before_BSK, after_BSK = choices(rng), choices(rng)
    after_BSK[:, : S // 2] = before_BSK[:, : S // 2]
    slot_BSK = mine.slots(after_BSK, E, C)[:, : S // 2]
    same("slot_BSK of the first half, with another second half,", slot_BSK, right(before_BSK)[:, : S // 2])


def placed(x_BSD: Tensor, experts_BSK: Tensor) -> Tensor:
    """Return rows_EBCD by a loop over the choices."""
    slot_BSK, rows_EBCD = right(experts_BSK), x_BSD.new_zeros(E, len(x_BSD), C, D)
    for b, s, k in (slot_BSK >= 0).nonzero().tolist():
        rows_EBCD[experts_BSK[b, s, k], b, slot_BSK[b, s, k]] = x_BSD[b, s]
    return rows_EBCD


@target("rows in their slots, and zeros in the empty ones")
def rows(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Slots are given."""
    experts_BSK, x_BSD = choices(rng), draw(rng, B, S, D)
    got = mine.dispatch(x_BSD.clone(), experts_BSK.clone(), right(experts_BSK), E, C)
    same("rows_EBCD", got, placed(x_BSD, experts_BSK))


@target("y and gradients of a loop over tokens, on 1, 2 and 4 ranks", ranks=(1, 2, 4))
def results(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Experts are tanh(x W); a choice that is dropped adds nothing."""
    experts_BSK, dy_BSD = own(choices(rng), group), own(draw(rng, B, S, D), group)
    given = own(draw(rng, B, S, D), group), own(draw(rng, B, S, K).abs(), group), draw(rng, E, D, D)
    theirs, mine_too = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    slot_BSK = right(experts_BSK)
    all_BSKD = torch.tanh(theirs[0][:, :, None, None, :] @ theirs[2][experts_BSK])[..., 0, :]
    kept_BSK = (slot_BSK >= 0).double()
    weights_BSK = theirs[1] * kept_BSK
    want = (all_BSKD * weights_BSK[..., None]).sum(2)
    want.backward(dy_BSD)
    rows_EBCD = mine.dispatch(mine_too[0], experts_BSK.clone(), slot_BSK.clone(), E, C)
    y_EBCD = torch.tanh(rows_EBCD @ mine_too[2][:, None])
    got = mine.combine(y_EBCD, experts_BSK.clone(), slot_BSK.clone(), mine_too[1])
    share_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True).clamp(min=1e-300)
    last_BSK = torch.where(slot_BSK < 0, C - 1, slot_BSK)
    wrong_BSKD = y_EBCD[experts_BSK, torch.arange(len(slot_BSK))[:, None, None], last_BSK]
    mistakes = {
        "the sum without the weights": (all_BSKD * kept_BSK[..., None]).sum(2),
        "a sum in which the weights of the kept choices were made to add up to 1": (
            all_BSKD * share_BSK[..., None]
        ).sum(2),
        "a sum with dropped choices too, computed as if there were room": (
            all_BSKD * theirs[1][..., None]
        ).sum(2),
        "a sum with dropped choices too: slot -1 is the last one": (wrong_BSKD * theirs[1][..., None]).sum(2),
    }
    same("y_BSD through dispatch, experts and combine", got, want, mistakes)
    backpropagate("y_BSD", got, dy_BSD)
    for name, a, b in zip(("x", "the weights", "the experts"), mine_too, theirs, strict=True):
        same(f"the gradient of {name}", a.grad, b.grad)
