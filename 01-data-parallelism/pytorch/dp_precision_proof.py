"""Proof of dp_mixed_precision.py and dp_loss_scaling.py: one device that rounds likewise, and what 16 bits lose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.ledger import show_bytes
from common.comm.mesh import Mesh
from common.launch.command_line import Count, Size, Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.comparison import Formula, Lesson
from common.lesson.equality import KINDS, OPTIMIZERS, Difference, Followed, compare, largest, worst_of_world
from common.lesson.job import Job, Train, one_device
from common.lesson.runner import console
from common.lesson.training import Batches, make_model, shape_of
from common.models.transformer import Transformer, cross_entropy_sum
from common.utils.memory import saved_bytes

from dp_costs import zero_start
from dp_training import DataParallelOptions, on_one_device, on_ranks

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


@dataclass
class ScalingOptions(PrecisionOptions):
    """Options: the scaler, and the step whose gradient overflows."""

    steps: Count = 6
    """Training steps."""
    scale: Annotated[float, Within(1e-6, 1e30)] = 4096.0
    """Initial loss scale; torch's is 65536. A power of two costs no precision."""
    interval: Count = 2
    """Steps in a row without overflow after which the scale doubles; torch's is 2000."""
    overflow: Count = 3
    """Number of the step, counted from 0, in which a gradient of the last rank overflows."""
    versions: tuple[str, ...] = ("bucketed", "zero2", "ddp")
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


def finite(followed: Followed, steps: int | None = None) -> Followed:
    """Return the first steps of a result, without the gradients, recorded as scaled, that overflowed."""
    good = [t for t, norm in enumerate(followed.norms[:steps]) if math.isfinite(norm)]
    return replace(
        followed,
        losses=followed.losses[:steps],
        gradients=[followed.gradients[t] for t in good],
        norms=[followed.norms[t] for t in good],
    )


def against(
    reference: Followed, mine: Followed, mesh: Mesh, steps: int | None = None
) -> dict[str, Difference]:
    """Return the largest differences of all ranks, of the first steps or of all; infinite if other steps overflowed."""
    found = dict.fromkeys(KINDS, Difference(math.inf, "another step was skipped"))
    a, b = (list(map(math.isfinite, run.norms[:steps])) for run in (reference, mine))
    if a == b:
        found = compare(finite(reference, steps), finite(mine, steps))
    return worst_of_world(found, mesh)


class Comparison:
    """Equality table of runs in 16 bits, and the rows that are not equal."""

    def __init__(self, title: str) -> None:
        numbers = ("at first", *(kind.removeprefix("gradient ") for kind in KINDS), "bytes sent", "formula")
        heads = ("version", "optimizer", *(f">{number}" for number in numbers))
        self.table, self.wrong = make_table(title, heads), list[str]()

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
    heads = ("format", ">gradients", "largest in", ">vanish", ">saved for backward")
    table = make_table(f"one device against float32: {o.model}, the first step", heads)
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


def compared(
    rt: Runtime, o: PrecisionOptions, precision: torch.dtype, lesson: Lesson, references: Mapping[str, Train]
) -> Comparison:
    """Train every version with every optimizer; compare each with every reference on one device.

    references: by what their rows add to the version's name; the first rounds as the versions do.
    """
    mesh, like_versions = Mesh(rt.world, dp=rt.world_size), next(iter(references.values()))
    name = str(precision).removeprefix("torch.")
    comparison = Comparison(
        f"largest relative difference from one device: {rt.world_size} ranks, {o.model}, {name}, {o.steps} steps"
    )
    whole, same_cut = replace(o, micro_batches=1), partial(AsRanks, ranks=rt.world_size)
    for optimizer in OPTIMIZERS:
        alone = {
            label: on_one_device(rt, whole, train, "one device", optimizer)
            for label, train in references.items()
        }
        first_step = on_one_device(
            rt, replace(o, steps=1), like_versions, "one device", optimizer, make_batches=same_cut
        )
        for name in o.versions:
            mine, _, counted = on_ranks(rt, o, lesson.versions[name], name, optimizer, lesson.unseen)
            formula = lesson.bytes_of_run(name, shape_of(o), rt.world, o)
            # DDP multiplies its losses by n, which rounds differently for n = 3
            first = against(first_step, mine, mesh, steps=1)["gradients"] if name != "ddp" else None
            for label, reference in alone.items():
                found = against(reference, mine, mesh)
                comparison.add(name + label, optimizer, precision, first, found, counted, formula)
                first = None
    return comparison


def prove_precision(rt: Runtime, o: PrecisionOptions, lesson: Lesson) -> bool:
    """Train every version in bfloat16; compare with one device in bfloat16 and in float32."""
    references = {"": lesson.versions["ddp"], " / f32": one_device}
    comparison = compared(rt, o, torch.bfloat16, lesson, references)
    console(rt).print(comparison.table, formats(rt, o))
    console(rt).print(comparison.sentence())
    return not comparison.wrong


Scaled = tuple[Callable[[Job[Any], Any], Iterator[Tensor]], Callable[[Job[Any]], Any]]
"""A version: its training loop, to be called with a job and a scaler, and the function that makes the scaler."""
Scales = list[tuple[float, bool]]
"""Of each step: the scale, and True if this rank saw an overflow."""


def overflowing(job: Job[ScalingOptions], version: Scaled, scales: Scales) -> Iterator[Tensor]:
    """Run a version in which a gradient of the last rank overflows in step --overflow; note its scales.

    The gradient overflows in the first micro-batch, as if its product had left float16's range.
    """
    train, make_scaler = version
    scaler, done = make_scaler(job), list[int]()

    def hook(gradient: Tensor) -> Tensor:
        if len(scales) != job.options.overflow or done:
            return gradient
        done.append(len(scales))
        return (gradient.half() * 2.0**40).float()

    if job.group.rank == job.group.size - 1:
        job.model.layers[0].attention.q_proj.weight.register_hook(hook)  # type: ignore[union-attr, operator]
    for loss in train(job, scaler):
        assert job.owner
        gradients = [p.grad for _, p in job.owner.named_parameters() if p.grad is not None]
        scales.append((scaler.get_scale(), not all(g.isfinite().all() for g in gradients)))
        yield loss


def prove_scaling(
    rt: Runtime, o: ScalingOptions, versions: Mapping[str, Scaled], step_bytes: Formula
) -> bool:
    """Train every version in float16 beside one device; show the ranks that see the overflow and that skip the step."""
    scales: dict[str, Scales] = {}

    def train(job: Job[ScalingOptions]) -> Iterator[Tensor]:
        scales[job.version] = []
        return overflowing(job, versions.get(job.version, versions["ddp"]), scales[job.version])

    trains = dict.fromkeys(versions, train)
    lesson = Lesson("dp", trains, step_bytes, start_bytes=zero_start, unseen=("ddp",))
    comparison = compared(rt, o, torch.float16, lesson, {"": train})
    title = f"in step {o.overflow} a gradient of rank {rt.world_size - 1} overflows"
    columns = ("version", "ranks that see it", "ranks that skip the step", "scale of each step")
    skips = make_table(title, columns)
    for name in o.versions:
        factors, seen = zip(*scales[name], strict=True)
        skipped = factors[o.overflow] > factors[o.overflow + 1]
        ranks = (ranks_where(mine, rt.world) for mine in (seen[o.overflow], skipped))
        skips.add_row(name, *ranks, " ".join(f"{s:g}" for s in factors))
    console(rt).print(comparison.table, skips)
    console(rt).print(comparison.sentence())
    return not comparison.wrong


def ranks_where(mine: bool, group: Group) -> str:
    """Return the ranks on which `mine` is true, as text."""
    return " ".join(str(rank) for rank, true in enumerate(comm.everyones(mine, group)) if true) or "none"
