"""Compare the module hybrid_libtorch with the plain Transformer, and with Python's Hybrid on the same mesh.

Each mesh trains two steps: every gradient and weight against one device; loss, norm and the bytes along each
axis against Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.mesh import Mesh
from common.data.text import rank_slice
from common.lesson.equality import OPTIMIZERS, largest
from common.models.configs import TransformerConfig, gpt2, llama, mixtral
from common.models.transformer import Transformer, cross_entropy_sum

from hybrid_languages import in_libtorch, schedule_of
from hybrid_layout import Layout
from hybrid_model import Hybrid

GPT2 = gpt2(layers=2, width=16, heads=4, sequence=24, vocabulary=20)
LLAMA = llama(layers=2, width=16, heads=4, kv_heads=2, mlp_width=12, sequence=24, vocabulary=20)
MIXTRAL = mixtral(
    layers=2, width=16, heads=4, kv_heads=2, mlp_width=12, sequence=24, vocabulary=20, experts=4
)
GPT2_MOE = replace(GPT2, experts=3)
BATCH, SEQUENCE, STEPS, CLIP = 16, 16, 2, 0.5


@dataclass(frozen=True)
class Case:
    """A mesh, and what trains on it."""

    config: TransformerConfig
    axes: dict[str, int]
    layout: Layout


def case(config: TransformerConfig, axes: dict[str, int], **layout: Any) -> Case:
    return Case(config, axes, replace(Layout(), **layout))


CASES = {
    1: [case(GPT2, {}), case(MIXTRAL, {})],
    2: [
        case(GPT2, {"dp": 2}, zero=1),
        case(GPT2, {"pp": 2}, schedule="zb-h1"),
        case(LLAMA, {"tp": 2}, sequence_parallel=True),
        case(MIXTRAL, {"ep": 2}),
    ],
    4: [
        case(GPT2, {"pp": 2, "dp": 2}, zero=1),
        case(GPT2, {"dp": 2, "tp": 2}, sequence_parallel=True, zero=1),
        case(LLAMA, {"tp": 4}),  # more ranks than heads of keys
        case(LLAMA, {"sp": 2, "tp": 2}, attention="ring"),
        case(MIXTRAL, {"ep": 2, "tp": 2}),
        case(GPT2_MOE, {"ep": 2, "tp": 2}, sequence_parallel=True),
    ],
    8: [
        case(replace(GPT2, layers=4), {"pp": 2, "dp": 2, "tp": 2}, schedule="zb-v"),
        case(
            replace(LLAMA, layers=4),
            {"pp": 2, "sp": 2, "tp": 2},
            sequence_parallel=True,
            schedule="interleaved",
        ),
        case(MIXTRAL, {"pp": 2, "ep": 2, "sp": 2}),
        case(MIXTRAL, {"dp": 2, "ep": 2, "tp": 2}, zero=1, sequence_parallel=True),
    ],
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the step's tokens and targets, some of which are padding."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(20, (2, BATCH, SEQUENCE), generator=generator)
    targets[0, 5:] = -100
    return tokens, targets


def gradients(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


class Apart:
    """The largest difference of each kind."""

    def __init__(self) -> None:
        self.found: dict[str, float] = defaultdict(float)

    def include(self, kind: str, expected: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
        assert expected.keys() == ours.keys(), kind
        self.found[kind] = max(self.found[kind], largest(expected, ours).value)


def by_axis(sent: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sums of bytes by axis, without zeros."""
    sums: dict[str, float] = defaultdict(float)
    for axis, n_bytes in sent:
        sums[axis] += n_bytes
    return {axis: n for axis, n in sums.items() if n}


def trained(case: Case, world: Group) -> dict[str, Any]:
    """Train the same steps three times; return the differences, and bytes by axis of the module and of Python."""
    mesh = Mesh(world, **{"dp": 1, **case.axes})
    plain = Transformer(case.config, 0, torch.float64)
    theirs = Hybrid(case.config, mesh, case.layout, torch.device("cpu"), torch.float64)
    whole = dict(plain.named_parameters())
    ours = in_libtorch(case.config, case.layout, mesh, whole, schedule_of(case.layout, mesh))
    mine = ours.parameters()
    make = OPTIMIZERS["sgd" if case.layout.zero else "adamw"]
    optimizers = [make(list(p)) for p in (plain.parameters(), theirs.parameters(), mine.values())]
    lo, hi = rank_slice(BATCH, theirs.samples.rank, theirs.samples.size)
    apart, counted, expected_bytes = Apart(), {}, {}  # the bytes are those of the last step
    for step in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        tokens, targets = batch(step)
        total, count = cross_entropy_sum(plain(tokens), targets)
        (total / count).backward()
        ours.take_messages()
        loss = ours.step(tokens[lo:hi], targets[lo:hi])
        apart.include("gradient", ours.pieces(gradients(dict(plain.named_parameters()))), gradients(mine))
        norm = torch.tensor(ours.clip(CLIP), dtype=torch.float64)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        with Ledger() as ledger:
            their_loss = theirs.step(tokens[lo:hi], targets[lo:hi])
            their_norm = theirs.clip(CLIP)
            for each in optimizers:
                each.step()
        ours.stepped()
        for kind, value, others in (
            ("loss", loss, (total.detach() / count, their_loss)),
            ("norm", norm, (expected, their_norm)),
        ):
            for other in others:
                apart.include(kind, {"": other.reshape(())}, {"": value.reshape(())})
        counted = by_axis((axis, n_bytes) for axis, _, n_bytes, _ in ours.take_messages())
        expected_bytes = by_axis((row.axis, float(row.bytes)) for row in ledger.rows)
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    apart.include("weight", ours.pieces(weights), {name: p.detach() for name, p in mine.items()})
    mesh.close()
    return {
        "case": str(case),
        "apart": apart.found,
        "names": sorted(mine),
        "their names": sorted(name for name, _ in theirs.named_parameters()),
        "bytes": counted,
        "their bytes": expected_bytes,
    }


def outcomes(group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Train on each mesh of as many ranks as the world has."""
    rank, size = (group.rank(), group.size()) if group else (0, 1)
    world = Group("world", rank, size, tuple(range(size)), group)
    return [trained(case, world) for case in CASES[size]]
