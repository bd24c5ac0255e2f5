"""Proof of dp_mixed_precision.py and dp_loss_scaling.py: one device that rounds likewise, and what 16 bits lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Literal

import torch
from rich.table import Table
from torch import Tensor

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
    compare,
    largest,
    watch,
    worst_of_world,
)
from common.lesson.job import Job, Train, one_device
from common.lesson.runner import console
from common.lesson.training import Batches, make_model
from common.models.transformer import Transformer, cross_entropy_sum
from common.utils.memory import saved_bytes

from dp_costs import basic_run
from dp_training import DataParallelOptions

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
    versions: tuple[str, ...] = ("bucketed", "ddp")
    """Versions to run."""


def in_precision(model: Transformer, precision: torch.dtype) -> Transformer:
    """Make the model's products run in this precision, in place; return the model."""
    if precision != torch.float32:
        device = next(model.parameters()).device.type
        model.forward = torch.autocast(device, precision)(model.forward)  # type: ignore[method-assign]
    return model


@dataclass
class AsRanks(Batches):
    """Micro-batches of all of so many ranks, one after another, on one device."""

    ranks: int = 1

    def samples(self) -> list[tuple[int, int]]:
        """Return the samples [lo, hi) of the global batch of each micro-batch."""
        of_ranks = []
        for r in range(self.ranks):
            self.group = Group("part", r, self.ranks, (r,))
            of_ranks += super().samples()
        return of_ranks


def on_one_device(
    precision: torch.dtype, optimizer: str, rt: Runtime, o: PrecisionOptions, as_ranks: int = 0
) -> Followed:
    """Train on one device with the whole batch at once; return the result.

    as_ranks: if not 0, use instead the micro-batches of so many ranks, one after another.
    """
    o = o if as_ranks else replace(o, micro_batches=1)
    model = in_precision(make_model(o, rt.device), precision)
    job = Job(rt, o, "one device", model, Mesh(Group.alone()), "dp", OPTIMIZERS[optimizer], o.steps)
    job.make_batches = partial(AsRanks, ranks=as_ranks or 1)
    return watch(one_device(job), job)


def on_ranks(train: Train, name: str, optimizer: str, rt: Runtime, o: PrecisionOptions) -> Followed:
    """Train a version on all ranks; return the result."""
    mesh = Mesh(rt.world, dp=rt.world_size)
    model = make_model(replace(o, seed=o.seed + rt.rank), rt.device)  # the broadcast must mend this
    job = Job(rt, o, name, model, mesh, "dp", OPTIMIZERS[optimizer], o.steps)
    return watch(train(job), job, mesh)


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
    ((tokens_BS, targets_BS),) = Batches(replace(o, micro_batches=1), Group.alone(), rt.device).parts(0)

    def first(precision: torch.dtype, scale: float) -> tuple[dict[str, Tensor], int]:
        model = in_precision(make_model(o, rt.device), precision)

        def loss() -> Tensor:
            loss_sum, count = cross_entropy_sum(model(tokens_BS), targets_BS)
            return loss_sum / count

        (loss() * scale).backward()
        gradients = {name: p.grad / scale for name, p in model.named_parameters() if p.grad is not None}
        return gradients, saved_bytes(loss, model)

    expected, _ = first(torch.float32, 1.0)
    for name, precision, scale in FORMATS:
        gradients, saved = first(precision, scale)
        found = largest(expected, gradients)
        vanished = sum(int(((g == 0) & (expected[key] != 0)).sum()) for key, g in gradients.items())
        table.add_row(name, f"{found.value:.1e}", found.where, f"{vanished:,}", show_bytes(saved))
    return table


def prove(rt: Runtime, o: PrecisionOptions, versions: Mapping[str, Train]) -> bool:
    """Train every version in bfloat16; compare with one device in bfloat16 and in float32."""
    mesh, brief = Mesh(rt.world, dp=rt.world_size), torch.bfloat16
    comparison = Comparison(
        f"largest relative difference from one device: {rt.world_size} ranks, {o.model}, bfloat16, {o.steps} steps"
    )
    for optimizer in OPTIMIZERS:
        same = on_one_device(brief, optimizer, rt, o)
        precise = on_one_device(torch.float32, optimizer, rt, o)
        same_cut = on_one_device(brief, optimizer, rt, replace(o, steps=1), as_ranks=rt.world_size)
        for name in o.versions:
            with Listener(rt.world) if name == "ddp" else Ledger() as ledger:
                mine = on_ranks(versions[name], name, optimizer, rt, o)
            counted = ledger.bytes() - ledger.bytes("bookkeeping")
            formula = basic_run(name, make_model(o, rt.device), rt.world, o)
            # DDP multiplies its losses by n, which rounds differently for n = 3
            first = at_first(same_cut, mine, mesh) if name != "ddp" else None
            for text, reference in ((name, same), (f"{name} / f32", precise)):
                found = worst_of_world(compare(reference, mine), mesh)
                comparison.add(text, optimizer, brief, first, found, counted, formula)
                first = None
    console(rt).print(comparison.table, formats(rt, o))
    console(rt).print(comparison.sentence())
    return not comparison.wrong
