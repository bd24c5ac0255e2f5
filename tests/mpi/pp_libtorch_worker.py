"""Compare the module pp_libtorch with the plain Transformer, on groups of every size up to all ranks.

libtorch_worker.py runs it under mpirun, spawned ranks on gloo.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from mpi.said import said_by
from torch import Tensor

from common.lesson.equality import OPTIMIZERS, largest
from common.models.configs import gpt2
from common.models.transformer import Transformer, cross_entropy_sum

import pp_libtorch
from pp_schedules import make_schedule

CONFIG = gpt2(layers=8, width=16, heads=2, sequence=8, vocabulary=40)
BATCH, SEQUENCE, STEPS, MICRO_BATCHES = 7, 6, 2, 4
CASES = (("gpipe", "sgd"), ("1f1b", "adamw"), ("zb-h1", "sgd"), ("zb-v", "adamw"))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the step's tokens and targets, each (BATCH, SEQUENCE)."""
    generator = torch.Generator().manual_seed(step)
    shape = (2, BATCH, SEQUENCE)
    return tuple(torch.randint(CONFIG.vocabulary, shape, generator=generator))  # type: ignore[return-value]


class Apart:
    """The largest difference of each kind seen so far."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def include(self, kind: str, expected: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
        """Record the largest difference over the tensors that `ours` holds."""
        value = largest({name: expected[name] for name in ours}, ours).value
        self.found[kind] = max(self.found.get(kind, 0.0), value)


def trained(name: str, optimizer: str, up: Any, down: Any) -> dict[str, Any]:
    """Train two steps by a schedule; return the differences from the plain model, and bytes sent."""
    plain = Transformer(CONFIG, 0, torch.float64)
    schedule = make_schedule(name, up.size, MICRO_BATCHES)
    pipe = pp_libtorch.Pipeline(dict(plain.named_parameters()), CONFIG.heads, str(schedule), up, down)
    mine = pipe.parameters()
    optimizers = [OPTIMIZERS[optimizer](list(p)) for p in (plain.parameters(), mine.values())]
    apart = Apart()
    for step in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        tokens, targets = batch(step)
        loss = cross_entropy_sum(plain(tokens), targets)[0] / targets.numel()
        loss.backward()
        sizes = [BATCH // MICRO_BATCHES] * (MICRO_BATCHES - 1)
        sizes.append(BATCH - sum(sizes))
        parts = list(zip(tokens.split(sizes), targets.split(sizes), strict=True))
        ours = pipe.run(parts, 1 / targets.numel()) / targets.numel()
        apart.include("loss", {"": loss.detach()}, {"": ours})
        gradients = ({n: p.grad for n, p in of.items()} for of in (dict(plain.named_parameters()), mine))
        apart.include("gradient", *gradients)  # type: ignore[arg-type]
        for each in optimizers:
            each.step()
    weights = ({n: p.detach() for n, p in of.items()} for of in (dict(plain.named_parameters()), mine))
    apart.include("weight", *weights)
    return {
        "apart": apart.found,
        "names": sorted(mine),
        "bytes": [sum(n for _, n, _ in pipe.take_messages()) / up.size, STEPS * formula(schedule.owner, up)],
    }


def formula(owner: tuple[int, ...], ranks: Any) -> float:
    """Return the bytes that this rank sends in a step."""
    sides = sum(ranks.rank in (a, b) for a, b in itertools.pairwise(owner) if a != b)
    tied = owner[0] != owner[-1] and ranks.rank in (owner[0], owner[-1])
    numbers = sides * BATCH * SEQUENCE * CONFIG.width + tied * CONFIG.vocabulary * CONFIG.width
    return 8 * (numbers + 2 * (ranks.size - 1) / ranks.size)


def refused(ranks: Any) -> list[str]:
    """Return the module's errors for invalid arguments, each raised before any message is sent."""
    whole = dict(Transformer(CONFIG).named_parameters())
    n = ranks.size
    some = {name: p for name, p in whole.items() if name != "norm.bias"}
    text = str(make_schedule("1f1b", n, 2))

    def run() -> None:
        pp_libtorch.Pipeline(whole, 2, text, ranks, ranks).run([], 1.0)

    calls = [
        lambda: pp_libtorch.Pipeline(whole, 2, str(make_schedule("1f1b", n + 1, 2)), ranks, ranks),
        lambda: pp_libtorch.Pipeline(whole, 2, str(make_schedule("interleaved", n, 2, 9)), ranks, ranks),
        lambda: pp_libtorch.Pipeline(whole, 3, text, ranks, ranks),
        lambda: pp_libtorch.Pipeline(some, 2, text, ranks, ranks) if ranks.rank == n - 1 else run(),
        run,
    ]
    return said_by(calls)


def outcomes(up: dist.ProcessGroup | None, down: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Run all checks on two groups of the same ranks. Without `down`, `up` must be the world."""
    if up and not down:
        down = dist.new_group(dist.get_process_group_ranks(up))
    ways = pp_libtorch.Ranks(up), pp_libtorch.Ranks(down)
    return {
        "trained": {name: trained(name, optimizer, *ways) for name, optimizer in CASES},
        "refused": refused(ways[0]),
    }


def on_mpi() -> dict[int, list[Any]]:
    """Run all checks on each group size, under mpirun. The import is here because it starts MPI."""
    from mpi.worker import WORLD, on_first_ranks

    from common.launch.runtime import runtime

    with runtime():
        sizes = range(1, WORLD.size + 1)
        ways = {n: [dist.new_group(list(range(n))) for _ in range(2)] for n in sizes if n > 1}
        return on_first_ranks(sizes, lambda n: outcomes(*ways.get(n, [None])))
