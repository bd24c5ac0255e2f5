"""Targets of two stages by hand: gradients of one device, messages of the border, and an order that overlaps."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group
from common.grade.targets import counted, exactly, holds, same, same_gradients, target

I, H, D, O = 4, 6, 5, 3  # widths: input, inside the first stage, border, output  # noqa: E741
Parts = list[tuple[Tensor, Tensor]]


def model(rng: torch.Generator) -> nn.ModuleDict:
    """Return the two stages, with random parameters in float64."""
    first = nn.Sequential(nn.Linear(I, H), nn.Tanh(), nn.Linear(H, D))
    stages = nn.ModuleDict({"first": first, "last": nn.Sequential(nn.Tanh(), nn.Linear(D, O))}).double()
    with torch.no_grad():
        for p in stages.parameters():
            p.copy_(torch.randn(p.shape, generator=rng, dtype=p.dtype))
    return stages


def batch(rng: torch.Generator, sizes: tuple[int, ...]) -> Parts:
    """Return micro-batches of these sizes."""
    return [tuple(torch.randn(b, n, generator=rng, dtype=torch.float64) for n in (I, O)) for b in sizes]  # type: ignore[misc]


def one_device(stages: nn.ModuleDict, parts: Parts, divisors: list[float]) -> tuple[Tensor, nn.ModuleDict]:
    """Return the loss, and a copy with its gradients. divisors: what the loss of each micro-batch is divided by."""
    alone = deepcopy(stages)
    losses = [
        ((alone["last"](alone["first"](x)) - y) ** 2).sum() / d
        for (x, y), d in zip(parts, divisors, strict=True)
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), alone


def crossed(stages: nn.ModuleDict, parts: Parts) -> nn.ModuleDict:
    """Return a copy with the gradients of a first stage that takes the gradients of h in the opposite order."""
    alone, samples = deepcopy(stages), sum(len(x) for x, _ in parts)
    h = [alone["first"](x) for x, _ in parts]
    received = [z.detach().requires_grad_() for z in h]
    for z, (_, y) in zip(received, parts, strict=True):
        (((alone["last"](z) - y) ** 2).sum() / samples).backward()
    for z, other in zip(h, reversed(received), strict=True):
        z.backward(other.grad)
    return alone


def mistakes(stages: nn.ModuleDict, parts: Parts) -> dict[str, tuple[Tensor | None, nn.ModuleDict]]:
    """Return (loss, model with gradients) of typical mistakes, by name."""
    sizes = [len(x) for x, _ in parts]
    total = float(sum(sizes))
    found: dict[str, tuple[Tensor | None, nn.ModuleDict]] = {
        "that of the last micro-batch alone: add to .grad": one_device(stages, parts[-1:], [total]),
        "that of the first micro-batch alone": one_device(stages, parts[:1], [total]),
        "that of losses divided by the samples of their micro-batch, not of the batch": one_device(
            stages, parts, [float(b) for b in sizes]
        ),
    }
    if len(set(sizes)) > 1:
        found["that of a mean over micro-batches of their means, but their sizes differ"] = one_device(
            stages, parts, [float(b * len(sizes)) for b in sizes]
        )
    else:
        found["what comes of the gradients of h in the opposite order"] = (None, crossed(stages, parts))
    return found


def compare(mine: Any, group: Group, rng: torch.Generator, sizes: tuple[int, ...]) -> None:
    """Compare the gradients of this rank's stage, and on rank 1 the loss."""
    stages, parts, own = model(rng), batch(rng, sizes), ("first", "last")[group.rank]
    loss, right = one_device(stages, parts, [float(sum(sizes))] * len(sizes))
    wrong = mistakes(stages, parts) if len(sizes) > 1 else {}
    got = mine.train_step(stages[own], parts, D, group)

    def named(of: nn.ModuleDict) -> dict[str, Tensor]:
        return {f"{own}.{name}": p for name, p in of[own].named_parameters()}

    if group.rank == 1:
        same("the returned loss", got, loss, {name: of for name, (of, _) in wrong.items() if of is not None})
    gradients = {name: {n: p.grad for n, p in named(of).items()} for name, (_, of) in wrong.items()}
    same_gradients(named(stages).items(), named(right).items(), gradients)


@target("one micro-batch: loss and gradients of one device", ranks=(2,))
def one_piece(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Only the border between the stages can be wrong here."""
    compare(mine, group, rng, (3,))


@target("micro-batches of one size: loss and gradients of one device", ranks=(2,))
def several(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The scale of the loss, the sum over micro-batches, and their order."""
    compare(mine, group, rng, (2, 2, 2))


@target("uneven micro-batches: loss and gradients of one device", ranks=(2,))
def uneven(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The shapes of messages, and a loss that is divided by all samples."""
    compare(mine, group, rng, (3, 1, 2))


@target("each rank sends one message of h's size per micro-batch", ranks=(2,))
def the_messages(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The activation forward, its gradient back; nothing else travels."""
    sizes = (2, 4, 1, 3)
    stages, parts = model(rng), batch(rng, sizes)
    with counted("send", "recv") as ledger:
        mine.train_step(stages[("first", "last")[group.rank]], parts, D, group)
    sent = [int(row.bytes) for row in ledger.rows if row.op == "send"]
    exactly("messages that it sends", len(sent), len(sizes))
    for m, (b, got) in enumerate(zip(sizes, sent, strict=True)):
        exactly(f"bytes of message {m} ({b} samples of width {D})", got, b * D * 8)


@target("rank 0 runs all forwards before its first backward", ranks=(2,))
def the_order(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Rank 0 must not wait for a gradient while it has forwards to do; rank 1 computes meanwhile."""
    stages, parts = model(rng), batch(rng, (2, 1, 2, 1))
    stage, order = stages[("first", "last")[group.rank]], []
    stage.register_forward_hook(lambda *_: order.append("F"))
    next(stage.parameters()).register_hook(lambda _: order.append("B"))
    mine.train_step(stage, parts, D, group)
    run = "".join(order)
    exactly("forward passes of the stage, each of a micro-batch", run.count("F"), len(parts))
    exactly("backward passes of the stage, each of a micro-batch", run.count("B"), len(parts))
    if group.rank == 0:
        ahead = run.index("B")
        holds(
            ahead == len(parts),
            f"it runs {' '.join(run)} (F: a forward, B: a backward): slot {ahead} is a backward although "
            f"{len(parts) - ahead} micro-batches are still to be sent, for which rank 1 waits",
        )
