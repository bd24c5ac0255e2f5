"""Mixed precision: multiply in 16 bits; keep the weights, the sums over ranks and the optimizer in 32.

                 bits of precision   largest    smallest
    float32      24                  3e38       1e-45
    bfloat16      8                  3e38       1e-40     float32 with the last 16 bits cut off
    float16      11                  65504      6e-8      gradients may vanish: dp_loss_scaling.py

    weights      float32 ── cast ── 16 bits ─┐
    activations                     16 bits ─┴─ product ── 16 bits ── loss: float32
    gradients    float32 ── cast ── 16 bits ─── backward ──────────────┘
    all-reduce, optimizer: float32

Versions: bfloat16 by autocast on the data parallelism of dp_basic.py, and on torch's DDP.

Each rank rounds its part of a gradient before the parts are summed; one device rounds the whole gradient. So
we prove:
    - the first gradients equal those of one device that splits its batch as the ranks do: 1e-5, as in float32
    - the run equals that of one device, in bfloat16 and in float32, up to 32 roundings of 2^-8

Cost: the bytes of float32, since gradients are float32. Memory: a layer's activations shrink to about 5/8,
but a 16-bit copy of the weights is kept from the forward to the backward pass, so memory is saved only from
some hundred tokens on. Micikevicius et al., "Mixed precision training" (arXiv:1710.03740).

    python dp_mixed_precision.py --nproc 4          torchrun --nproc_per_node=4 dp_mixed_precision.py
    mpirun -np 4 python dp_mixed_precision.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger, show_bytes
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.equality import (
    KINDS,
    OPTIMIZERS,
    Difference,
    Followed,
    Wrap,
    compare,
    follow,
    plain,
    worst_of_world,
)
from common.lesson.runner import console, run
from common.lesson.training import Batches, Version, make_model
from common.models.transformer import Transformer, cross_entropy_sum
from common.utils.memory import saved_bytes

from dp_basic import make_version, run_bytes
from dp_training import DataParallelOptions, check

VERSIONS = ("bucketed", "ddp")
FORMATS = (
    ("float32", torch.float32, 1.0),
    ("bfloat16", torch.bfloat16, 1.0),
    ("float16", torch.float16, 1.0),
    ("float16, scaled", torch.float16, 4096.0),
)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the largest relative error of one rounding
ROUNDINGS = 32  # a gradient of two layers passes about twenty products; each rounds
SAME_CUT = 1e-5  # sums of float32 in another order


@dataclass
class PrecisionOptions(DataParallelOptions, without=("dtype", "benchmark", "scaling", "json", "plot")):
    """Options of training in 16 bits with float32 weights; no timing: many processors are slow in 16 bits."""

    dtype: Literal["float64", "float32"] = "float32"
    sequence: Size = 16
    """Tokens per sample."""
    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""


@dataclass
class Trainer:
    """Training of a model in one precision, by all ranks together or by one device."""

    model: Transformer
    version: Version
    group: Group
    parts: Callable[[int], list[tuple[Tensor, ...]]]
    precision: torch.dtype
    mesh: Mesh | None = None
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    wrap: Wrap = plain
    at: list[int] = field(default_factory=list)  # current step and micro-batch

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the sum of the losses, float32.

        Autocast casts the inputs and weights of products, and keeps the casts.
        """
        mixed = self.precision != torch.float32
        with torch.autocast(tokens_BS.device.type, self.precision, mixed):
            logits_BSV = self.version.model(tokens_BS)
        return cross_entropy_sum(logits_BSV, targets_BS)[0]

    def step(self, t: int) -> Tensor:
        """Run the training step of common/lesson/training.py; return the global loss.

        The backward pass runs in the precisions of the forward pass.
        """
        parts = self.parts(t)
        targets = torch.stack([y.ne(-100).sum() for _, y in parts]).sum()
        comm.all_reduce(targets, self.group)
        share = (self.group.size if self.version.averages else 1) / targets.item()
        loss = torch.zeros((), device=targets.device)
        for i, part in enumerate(parts):
            self.at[:] = t, i
            with self.version.no_sync() if i < len(parts) - 1 else nullcontext():
                total = self.forward(*part)
                self.scale(total * share).backward()
            loss += total.detach()
        self.version.finish()
        comm.all_reduce(loss, self.group)
        return loss / targets.item()

    def train(self, optimizer: str, steps: int) -> Followed:
        """Run all steps; return the results.

        Gradients are recorded as scaled; steps whose gradients overflow leave none.
        """
        owner = self.version.owner or self.model
        followed = follow(owner, optimizer, steps, self.step, self.mesh, self.wrap)
        good = [t for t, norm in enumerate(followed.norms) if math.isfinite(norm)]
        gradients = [followed.gradients[t] for t in good]
        return replace(followed, gradients=gradients, norms=[followed.norms[t] for t in good])


def on_ranks(name: str, precision: torch.dtype, rt: Runtime, o: PrecisionOptions) -> Trainer:
    """Return the trainer of a version of dp_basic.py on all ranks."""
    model = make_model(replace(o, seed=o.seed + rt.rank), rt.device)
    version, batches = make_version(name, model, rt, o), Batches(o, rt.world, rt.device)
    return Trainer(model, version, rt.world, batches.parts, precision, Mesh(rt.world, dp=rt.world_size))


def one_device(precision: torch.dtype, rt: Runtime, o: PrecisionOptions, as_ranks: int = 0) -> Trainer:
    """Return the trainer of the reference: one device with the whole batch at once.

    as_ranks: if not 0, use instead the micro-batches of so many ranks, one after another.
    """
    o = o if as_ranks else replace(o, micro_batches=1)
    every = [Batches(o, Group("one", r, as_ranks or 1, (rt.rank,)), rt.device) for r in range(as_ranks or 1)]
    model, alone = make_model(o, rt.device), Group.alone()
    parts = lambda t: [part for batches in every for part in batches.parts(t)]  # noqa: E731
    return Trainer(model, Version(model), alone, parts, precision)


def at_first(expected: Followed, mine: Followed, mesh: Mesh) -> Difference:
    """Return the difference of the gradients of step 0, the largest of all ranks."""
    first, other = (
        replace(f, losses=f.losses[:1], gradients=f.gradients[:1], norms=f.norms[:1])
        for f in (expected, mine)
    )
    return worst_of_world(compare(first, other), mesh)["gradients"]


class Comparison:
    """Equality table of runs in 16 bits, and the rows that are not equal."""

    def __init__(self, title: str) -> None:
        self.table, self.wrong = Table(title=title, title_justify="left"), list[str]()
        for column in ("version", "optimizer", "at first", *KINDS, "bytes sent", "formula"):
            left = column in ("version", "optimizer")
            self.table.add_column(column.removeprefix("gradient "), justify="left" if left else "right")

    def add(
        self,
        name: str,
        optimizer: str,
        precision: torch.dtype,
        first: Difference | None,
        found: dict[str, Difference],
        counted: Fraction,
        formula: Fraction,
    ) -> None:
        """Add a row. first: difference of the first gradients from one device with the same cut.

        AdamW turns a gradient that is only rounding, such as that of a key's bias, into full steps. So
        weights after AdamW are shown but not judged.
        """
        judged = [found[kind].value for kind in KINDS if (kind, optimizer) != ("weights", "adamw")]
        equal = max(judged) <= ROUNDINGS * ROUNDING[precision] and (first is None or first.value <= SAME_CUT)
        if not equal or counted != formula:
            self.wrong.append(f"{name}, {optimizer}")
        values = [f"{d.value:.1e}" if d else "-" for d in (first, *(found[kind] for kind in KINDS))]
        self.table.add_row(name, optimizer, *values, show_bytes(counted), show_bytes(formula))

    def sentence(self) -> str:
        """Return one line: what was proved, or which rows differ."""
        if self.wrong:
            return f"NOT equal to one device, or other bytes: {'; '.join(self.wrong)}"
        return (
            f"proved: equal to one device within {ROUNDINGS} roundings, at first within {SAME_CUT:.0e}, "
            "bytes counted = formula"
        )


def formats(rt: Runtime, o: PrecisionOptions) -> Table:
    """Return a table of the effect of each format on the first gradients and on memory, on one device.

    float16 is shown also with a loss multiplied by 4096, and its gradients divided by 4096:
    dp_loss_scaling.py.
    """
    table = Table(title=f"one device against float32: {o.model}, the first step", title_justify="left")
    for column in ("format", "gradients", "largest in", "vanish", "saved for backward"):
        table.add_column(column, justify="left" if column in ("format", "largest in") else "right")
    expected = one_device(torch.float32, rt, o).train("sgd", 1)
    for name, precision, scale in FORMATS:
        trainer = one_device(precision, rt, o)
        trainer.scale = lambda loss: loss * scale  # noqa: B023
        mine = trainer.train("sgd", 1)
        mine.gradients = [{key: g / scale for key, g in of.items()} for of in mine.gradients]
        found = compare(expected, mine)["gradients"]
        vanished = sum(
            int(((g == 0) & (expected.gradients[0][key] != 0)).sum()) for key, g in mine.gradients[0].items()
        )
        (part,) = trainer.parts(0)
        saved = saved_bytes(lambda: trainer.forward(*part), trainer.model)  # noqa: B023
        table.add_row(
            name,
            f"{found.value:.1e}",
            found.where.removesuffix(", step 0"),
            f"{vanished:,}",
            show_bytes(saved),
        )
    return table


def prove(rt: Runtime, o: PrecisionOptions) -> bool:
    """Train every version in bfloat16; compare with one device in bfloat16 and in float32."""
    mesh, brief = Mesh(rt.world, dp=rt.world_size), torch.bfloat16
    comparison = Comparison(
        f"largest relative difference from one device: {rt.world_size} ranks, {o.model}, bfloat16, {o.steps} steps"
    )
    for optimizer in OPTIMIZERS:
        same = one_device(brief, rt, o).train(optimizer, o.steps)
        precise = one_device(torch.float32, rt, o).train(optimizer, o.steps)
        same_cut = one_device(brief, rt, o, as_ranks=rt.world_size).train(optimizer, 1)
        for name in o.versions:
            with Listener(rt.world) if name == "ddp" else Ledger() as ledger:
                mine = on_ranks(name, brief, rt, o).train(optimizer, o.steps)
            counted = ledger.bytes() - ledger.bytes("bookkeeping")
            formula = run_bytes(name, make_model(o, rt.device), rt.world, o)
            # DDP multiplies its losses by n, which rounds differently for n = 3
            first = at_first(same_cut, mine, mesh) if name != "ddp" else None
            for text, reference in ((name, same), (f"{name} / f32", precise)):
                found = worst_of_world(compare(reference, mine), mesh)
                comparison.add(text, optimizer, brief, first, found, counted, formula)
                first = None
    console(rt).print(comparison.table, formats(rt, o))
    console(rt).print(comparison.sentence())
    return not comparison.wrong


def main(rt: Runtime, o: PrecisionOptions) -> bool:
    """Check the options, and prove equality of the versions with one device."""
    check(rt, VERSIONS, o)
    return prove(rt, o)


if __name__ == "__main__":
    run(main, PrecisionOptions)
