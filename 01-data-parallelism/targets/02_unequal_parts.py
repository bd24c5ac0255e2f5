"""Targets of gradients with unequal parts: loss and gradients of one device, None where nobody used a parameter."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.comm import Group
from common.grade.targets import OPTIMIZERS, at_most, counted, exactly, same, same_gradients, share, target

D, H, C = 5, 6, 4  # numbers per sample, width, classes
IGNORED = -100


class Branches(nn.Module):
    """A trunk, three branches and a head: sample x takes branch x[0]. A branch without samples is not run."""

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()
        self.trunk = nn.Linear(D, H)
        self.branches = nn.ModuleList(nn.Linear(H, H) for _ in range(3))
        self.head = nn.Linear(H, C)
        self.seen = 0  # samples
        self.double()
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=rng, dtype=torch.float64)

    def forward(self, x_bD: Tensor) -> Tensor:
        """Return logits_bC."""
        self.seen += len(x_bD)
        h_bH, out_bH = self.trunk(x_bD).tanh(), x_bD.new_zeros(len(x_bD), H)
        for i, branch in enumerate(self.branches):
            if (mine := (x_bD[:, 0] == i).nonzero()[:, 0]).numel():
                out_bH = out_bH.index_add(0, mine, branch(h_bH[mine]))
        return self.head(out_bH)


def batch(
    parts: list[int], rng: torch.Generator, branch: list[int] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return (x_bD, y_b) of every rank; every third target does not count.

    branch: of all samples of each rank; default: 0, 1, 2, 0, 1, 2, ...
    """
    made = []
    for r, b in enumerate(parts):
        x_bD = torch.randn(b, D, generator=rng, dtype=torch.float64)
        x_bD[:, 0] = torch.arange(b) % 3 if branch is None else branch[r]
        y_b = torch.randint(C, (b,), generator=rng)
        y_b[1 + r % 2 :: 3] = IGNORED
        made.append((x_bD, y_b))
    return made


def one_device(model: nn.Module, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Set the gradients of the mean over the whole batch; return the mean."""
    x_BD, y_B = (torch.cat(both) for both in zip(*parts, strict=True))
    loss = F.cross_entropy(model(x_BD), y_B, ignore_index=IGNORED)
    loss.backward()
    return loss.detach()


LOSS = "the loss that it returns"


def computed(seed: int, terms: list[tuple[Tensor, Tensor, float]]) -> dict[str, Tensor]:
    """Return loss and gradients of Σ factor · (sum of the losses of a part) over (x, y, factor), 0 where unused."""
    model = Branches(torch.Generator().manual_seed(seed))
    losses = [F.cross_entropy(model(x_bD), y_b, reduction="sum") * factor for x_bD, y_b, factor in terms]
    sum(losses, torch.zeros(())).backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return found | {LOSS: torch.stack(losses).sum().detach()}


def compare(mine: Any, group: Group, parts: list[tuple[Tensor, Tensor]], rng: torch.Generator) -> None:
    """Compare loss and gradients of a batch with those of one device."""
    seed = int(torch.randint(10**6, (1,), generator=rng))
    ours, plain = (Branches(torch.Generator().manual_seed(seed)) for _ in range(2))
    loss, want = mine.backward(ours, *parts[group.rank], group), one_device(plain, parts)
    counts = [int((y_b != IGNORED).sum()) for _, y_b in parts]
    n, samples, targets = group.size, sum(len(y_b) for _, y_b in parts), sum(counts)
    by_rank = [computed(seed, [(x, y, 1 / targets)]) for x, y in parts]
    others = {
        name: sum((by_rank[r][name.replace("0", "1" if r else "0")] for r in range(n)), torch.zeros(()))
        for name in ("branches.0.weight", "branches.0.bias")
    }
    mistakes = {
        "the mean of the ranks' means; the parts have different numbers of targets": computed(
            seed, [(x, y, 1 / max(c, 1) / n) for (x, y), c in zip(parts, counts, strict=True)]
        ),
        f"divided by the {samples} samples; only {targets} of them have a target": computed(
            seed, [(x, y, 1 / samples) for x, y in parts]
        ),
        "that of this rank's part alone": by_rank[group.rank],
        "added to branch 1's of another rank; a rank without this gradient must take part with zeros": others,
    }
    same_gradients(ours.named_parameters(), plain.named_parameters(), mistakes)
    same(LOSS, loss, want, {mistake: of[LOSS] for mistake, of in mistakes.items() if LOSS in of})


@target("one rank, some targets do not count")
def one_rank(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The mean over the targets that count."""
    compare(mine, group, batch([9], rng), rng)


@target("parts of different sizes", ranks=(2, 3, 4))
def unequal_parts(mine: Any, group: Group, rng: torch.Generator) -> None:
    """All ranks use all parameters."""
    compare(mine, group, batch([4, 9, 7, 5][: group.size], rng), rng)


@target("parameters that some ranks do not use stay in step, unused ones None", ranks=(1, 2, 3))
def unused_parameters(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Rank 0 uses branch 0, the others branch 1, and no rank branch 2."""
    compare(mine, group, batch([4, 9, 6][: group.size], rng, [0, 1, 1]), rng)


@target("a rank without samples", ranks=(2, 3))
def no_samples(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Rank 0 has none, so it uses no branch."""
    compare(mine, group, batch([0, 7, 3][: group.size], rng), rng)


@target("weights after three steps of SGD and AdamW", ranks=(2,))
def three_steps(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Branch 2 stays as it is: an optimizer leaves alone what has no gradient."""
    for name, optimizer in OPTIMIZERS.items():
        seed = int(torch.randint(10**6, (1,), generator=rng))
        ours, plain = (Branches(torch.Generator().manual_seed(seed)) for _ in range(2))
        of_ours, of_plain = optimizer(ours.parameters()), optimizer(plain.parameters())
        for _ in range(3):
            parts = batch([4, 7], rng, [0, 1])
            of_ours.zero_grad()
            of_plain.zero_grad()
            mine.backward(ours, *parts[group.rank], group)
            one_device(plain, parts)
            of_ours.step()
            of_plain.step()
        for (weight, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
            same(f"{weight} after 3 steps of {name}", p, q)


@target("the model sees this rank's samples once, and the bytes are those of the gradients", ranks=(2, 3))
def the_bytes(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The batch is larger than the gradients, so that gathering it costs more."""
    parts, model = batch([60, 69, 66][: group.size], rng), Branches(rng)
    with counted("all_reduce") as ledger:
        mine.backward(model, *parts[group.rank], group)
    exactly("samples that the model sees on this rank", model.seen, len(parts[group.rank][1]))
    numbers = sum(p.numel() + 1 for p in model.parameters()) + 4
    at_most("bytes that it sends", ledger.bytes(), share(2, 8 * numbers, group))
