"""Targets of the buckets: summed gradients, one all-reduce per bucket, each started while the backward pass runs."""

from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group
from common.grade.targets import (
    OPTIMIZERS,
    counted,
    exactly,
    holds,
    same,
    same_gradients,
    share,
    target,
    traced,
)

H, LAYERS = 5, 6
LAYER = H * H + H  # elements of a layer


class Stack(nn.Module):
    """Layers one after the other. `events` holds ("backward", i) from the moment at which layer i's begins."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(LAYERS))
        random_weights(self, seed)
        self.events: list[tuple[str, int]] = []

    def forward(self, x_BH: Tensor) -> Tensor:
        """Return y_BH."""
        for i, layer in enumerate(self.layers):
            x_BH = layer(x_BH).tanh()
            x_BH.register_hook(lambda _, i=i: self.events.append(("backward", i)))
        return x_BH


class Fork(nn.Module):
    """Two layers beside one another. Autograd begins with the one that ran last, another one on odd ranks."""

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(H, H), nn.Linear(H, H)
        random_weights(self, seed)
        self.rank = rank

    def forward(self, x_BH: Tensor) -> Tensor:
        """Return y_BH."""
        order = [self.left, self.right] if self.rank % 2 == 0 else [self.right, self.left]
        first, second = (layer(x_BH).tanh() for layer in order)
        return first * second


def random_weights(model: nn.Module, seed: int) -> None:
    """Set weights that depend on the seed alone."""
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=rng, dtype=torch.float64)


def inputs(group: Group, rng: torch.Generator, micro_batches: int = 1) -> tuple[int, Tensor]:
    """Return (a seed for weights, x_RMBH: samples of each rank and micro-batch)."""
    seed = int(torch.randint(10**6, (1,), generator=rng))
    return seed, torch.randn(group.size, micro_batches, 3, H, generator=rng, dtype=torch.float64)


def loss_of(model: nn.Module, x_BH: Tensor, samples: int) -> Tensor:
    """Return the part of these samples in the mean over all samples."""
    return (model(x_BH) - 0.5).square().sum() / samples


def step(buckets: Any, model: nn.Module, x_MBH: Tensor, samples: int) -> None:
    """Run the micro-batches of a rank; the last one sends."""
    for i, x_BH in enumerate(x_MBH, 1):
        if i == len(x_MBH):
            buckets.begin()
        loss_of(model, x_BH, samples).backward()
        if i == len(x_MBH) and isinstance(model, Stack):
            model.events.append(("end", 0))
    buckets.finish()


def gradients(model: nn.Module, x_BH: Tensor, samples: int) -> dict[str, Tensor]:
    """Return the gradients on one device."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss_of(model, x_BH, samples), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def compare(mine: Any, group: Group, rng: torch.Generator, micro_batches: int, limit: int) -> None:
    """Compare the gradients of a step with those of one device."""
    seed, x_RMBH = inputs(group, rng, micro_batches)
    ours, plain = Stack(seed), Stack(seed)
    samples = x_RMBH[..., 0].numel()
    step(mine.Buckets(ours, group, limit), ours, x_RMBH[group.rank], samples)
    loss_of(plain, x_RMBH.flatten(0, 2), samples).backward()
    own, last = x_RMBH[group.rank].flatten(0, 1), x_RMBH[:, -1].flatten(0, 1)
    mistakes = {
        "that of this rank alone: the sums did not come back into p.grad": gradients(plain, own, samples),
        "that of the last micro-batch; those before it are missing": gradients(plain, last, samples),
    }
    same_gradients(ours.named_parameters(), plain.named_parameters(), mistakes)


@target("gradients summed over the ranks", ranks=(1, 2, 3))
def the_sum(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Buckets of one parameter, of two layers, and one of all."""
    for limit in (1, 2 * LAYER, 10**6):
        compare(mine, group, rng, 1, limit)


@target("gradients of earlier micro-batches travel, too", ranks=(2,))
def micro_batches(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Three micro-batches, of which the last one sends."""
    compare(mine, group, rng, 3, 2 * LAYER)


@target("one all-reduce per bucket", ranks=(2,))
def the_calls(mine: Any, group: Group, rng: torch.Generator) -> None:
    """By the rule of the text: limits with room to spare, exact ones, and one below every parameter."""
    seed, x_RMBH = inputs(group, rng)
    for limit, calls in (
        (1, 2 * LAYERS),
        (LAYER - 1, 2 * LAYERS),
        (2 * LAYER, 3),
        (2 * LAYER + 7, 3),
        (10**6, 1),
    ):
        model = Stack(seed)
        buckets = mine.Buckets(model, group, limit)
        with counted("all_reduce") as ledger:
            step(buckets, model, x_RMBH[group.rank], 6)
        exactly(f"all-reduces in a step with at most {limit} elements per bucket", len(ledger.rows), calls)
        exactly("bytes that it sends", ledger.bytes(), share(2, 8 * LAYERS * LAYER, group))


@target("each starts before the next bucket is complete, and none is waited for", ranks=(2,))
def the_overlap(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Three buckets of two layers: the first is complete when the backward pass of layer 3 begins."""
    seed, x_RMBH = inputs(group, rng)
    model = Stack(seed)
    buckets = mine.Buckets(model, group, 2 * LAYER)
    with traced(lambda event, _: model.events.append((event, 0))):
        step(buckets, model, x_RMBH[group.rank], 6)
    events = model.events
    begun = [events[: events.index(at)].count(("start", 0)) for at in (("backward", 1), ("end", 0))]
    early = events[: events.index(("end", 0))].count(("wait", 0))
    exactly("all-reduces that a hook waits for inside the backward pass", early, 0)
    holds(begun[1] > 0, "no all-reduce starts before the backward pass ends")
    for bucket, (started, where) in enumerate(
        zip(begun, ("layer 1 begins its backward pass", "the backward pass ends"), strict=True)
    ):
        holds(
            started > bucket,
            f"when {where}, {started} all-reduces have started; bucket {bucket}, with layers {5 - 2 * bucket} and "
            f"{4 - 2 * bucket}, was complete before",
        )


@target("ranks whose gradients come in different orders", ranks=(2, 3))
def the_order(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Each layer is a bucket. A bucket that leaves when it is complete meets another one on the next rank."""
    seed, x_RMBH = inputs(group, rng)
    samples = x_RMBH[..., 0].numel()
    ours, plain = Fork(seed, group.rank), Fork(seed, 0)
    step(mine.Buckets(ours, group, LAYER), ours, x_RMBH[group.rank], samples)
    loss_of(plain, x_RMBH.flatten(0, 2), samples).backward()
    by_rank = [gradients(plain, x_BH, samples) for x_BH in x_RMBH.flatten(1, 2)]
    other = {"left": "right", "right": "left"}
    mixed = {
        name: sum(
            of[name if (r - group.rank) % 2 == 0 else name.replace(side, other[side])]
            for r, of in enumerate(by_rank)
        )
        for name, side in ((name, name.split(".")[0]) for name in by_rank[0])
    }
    mistake = (
        "added to that of the other layer on the next rank: buckets must leave in one order on all ranks"
    )
    same_gradients(ours.named_parameters(), plain.named_parameters(), {mistake: mixed})


@target("weights after three steps of SGD and AdamW", ranks=(2,))
def three_steps(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Two micro-batches per step; the gradients become None after each step, or zero."""
    for to_none in (True, False):
        for name, optimizer in OPTIMIZERS.items():
            seed, x_RMBH = inputs(group, rng, 2)
            ours, plain = Stack(seed), Stack(seed)
            of_ours, of_plain = optimizer(ours.parameters()), optimizer(plain.parameters())
            buckets = mine.Buckets(ours, group, 2 * LAYER)
            for _ in range(3):
                step(buckets, ours, x_RMBH[group.rank], 12)
                loss_of(plain, x_RMBH.flatten(0, 2), 12).backward()
                of_ours.step()
                of_plain.step()
                of_ours.zero_grad(set_to_none=to_none)
                of_plain.zero_grad()
            for (weight, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
                same(f"{weight} after 3 steps of {name}", p, q)
