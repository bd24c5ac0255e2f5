"""Shared parts of the lessons of chapter 06: their options, the mesh, the proof against one device."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group, sizes_of
from common.comm.ledger import Ledger, Row
from common.comm.mesh import Mesh
from common.data.text import rank_slice
from common.errors import UsageError
from common.launch.command_line import Ranks, Size, Within
from common.launch.runtime import Runtime
from common.lesson.comparison import records, report
from common.lesson.equality import OPTIMIZERS, Followed, Start, follow, unequal_replicas, with_units
from common.lesson.measure import BenchmarkRecord, in_turn
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console
from common.lesson.training import (
    Batches,
    TrainingOptions,
    Version,
    make_model,
    shape_of,
    training_step,
    whole_step,
)

from hybrid_bytes import StepBytes
from hybrid_check import check
from hybrid_explain import bytes_table, explain, title
from hybrid_model import Hybrid, Layout, Schedule
from sp_sequence_parallel import Attention


@dataclass
class HybridOptions(TrainingOptions, without=("versions",)):
    """Options of the lessons of chapter 06: mesh, layout, model and batch."""

    steps: Annotated[int, Within(0, 10**9)] = 3
    """Training steps."""
    model: str = "mixtral-tiny"
    """Name of a model in common/models/configs.py."""
    batch: Size = 16
    """Samples in the global batch; the shares of places along dp and ep differ by one sample at most."""
    pp: Ranks = 1
    """Ranks along pp: stages of layers."""
    dp: Ranks | None = None
    """Ranks along dp: replicas of the model; default: all ranks that the other axes leave."""
    ep: Ranks = 1
    """Ranks along ep: experts, and one more axis of samples."""
    sp: Ranks = 1
    """Ranks along sp: shards of the sequence."""
    tp: Ranks = 1
    """Ranks along tp: shards of each matrix."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule: the order of the passes on each stage."""
    chunks: Annotated[int, Within(1, 1000)] = 2
    """Stages per rank if the schedule is interleaved."""
    attention: Attention = "zigzag"
    """Algorithm of attention across the ranks along sp."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: between the regions each rank along tp holds a slice of the tokens."""
    zero: Literal[0, 1, 2, 3] = 0
    """Stage of ZeRO along dp: 1 shards optimizer states, 2 also gradients, 3 also weights."""
    checkpointing: bool = False
    """Keep only the input of each layer, and recompute the layer in the backward pass."""
    precision: Literal["full", "bfloat16"] = "full"
    """Type in which products are computed; full means the type of the weights."""
    clip: Annotated[float, Within(0, 1e30)] = 0.0
    """Largest norm of the gradient; 0 means no clipping."""
    explain: bool = False
    """Print the mesh, each rank's place and memory, groups, bytes of a step; with --steps 0 only that."""

    def check(self) -> None:
        """Check that the options fit together. Raises UsageError.

        Construction does not check this, because a configuration file gives the options one by one.
        """
        if not self.steps and not self.explain:
            raise UsageError("--steps 0: give at least 1; 0 goes with --explain, and then nothing is trained")

    def layout(self) -> Layout:
        """Return the strategy options per axis. Raises UsageError for bfloat16 with float64 weights."""
        if self.precision == "bfloat16" and self.dtype == "float64":
            raise UsageError("--precision bfloat16 leaves float64 as it is; give --dtype float32 with it")
        return Layout(
            self.schedule,
            self.micro_batches,
            self.chunks,
            self.attention,
            self.sequence_parallel,
            self.zero,
            self.checkpointing,
            torch.bfloat16 if self.precision == "bfloat16" else None,
        )

    def mesh(self, rt: Runtime) -> Mesh:
        """Return the mesh of all ranks. Raises UsageError if the axes' product is not the number of ranks."""
        others = self.pp * self.ep * self.sp * self.tp
        dp = max(1, rt.world_size // others) if self.dp is None and others > 0 else self.dp or 0
        return Mesh(rt.world, self.pp, dp, self.ep, self.sp, self.tp, rt.timeout)


def make_hybrid(rt: Runtime, o: HybridOptions, mesh: Mesh) -> Hybrid:
    """Make the model of the options on the mesh. Raises UsageError on all ranks alike if it does not fit."""
    check(o.model_config(), mesh, o.layout(), o.batch, o.sequence)
    return Hybrid(o.model_config(), mesh, o.layout(), rt.device, DTYPES[o.dtype], o.seed)


Step = Callable[[int], Tensor]


def mesh_step(hybrid: Hybrid, rt: Runtime, o: HybridOptions) -> Step:
    """Return step(t) on the mesh: synchronise and clip gradients, return the loss of the global batch."""
    step = training_step(hybrid.version(), Batches(o, hybrid.samples, rt.device), hybrid.tokens)

    def clipped(t: int) -> Tensor:
        loss = step(t)
        if o.clip:
            hybrid.clip(o.clip)
        return loss

    return clipped


def one_device_step(model: nn.Module, rt: Runtime, o: HybridOptions) -> Step:
    """Return the same step on one device, with the plain model, one micro-batch and torch's clipping."""
    alone = Group.alone()
    if precision := o.layout().precision:
        model.forward = torch.autocast(rt.device.type, precision)(model.forward)
    step = training_step(Version(model), Batches(replace(o, micro_batches=1), alone, rt.device), alone)

    def clipped(t: int) -> Tensor:
        loss = step(t)
        if o.clip:
            nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        return loss

    return clipped


def reference(rt: Runtime, o: HybridOptions, optimizer: str) -> Followed:
    """Train on one device; return losses, gradients, norms and weights, with the units of `in_ulps`."""

    def run(start: Start) -> Followed:
        model = start(make_model(o, rt.device))
        return follow(model, optimizer, o.steps, one_device_step(model, rt, o))

    return with_units(run)


def samples_of(o: HybridOptions, hybrid: Hybrid) -> list[int]:
    """Return the number of samples in each of this rank's micro-batches."""
    group = hybrid.samples
    lo, hi = rank_slice(o.batch, group.rank, group.size)
    return sizes_of(hi - lo, o.micro_batches)


@dataclass
class Counted:
    """Training step that compares its bytes with the formula, each time and for each group."""

    step: Step
    formula: StepBytes
    agree: bool = True
    sent: Fraction = Fraction(0)
    by_formula: Fraction = Fraction(0)
    rows: list[Row] = field(default_factory=list)
    expected: Mapping[str, Fraction] = field(default_factory=dict)

    def __call__(self, t: int) -> Tensor:
        """Run step t; `rows` and `expected` are of the last call."""
        with Ledger() as ledger:
            loss = self.step(t)
        zero = self.formula.hybrid.zero
        self.formula.gathers = t > 0 or (zero is not None and zero.stage == 3)
        self.rows, self.expected = ledger.rows, self.formula.all()
        counted: dict[str, Fraction] = defaultdict(Fraction)
        for row in self.rows:
            counted[row.axis] += row.bytes
        self.agree &= {name: sent for name, sent in counted.items() if sent} == self.expected
        self.sent += ledger.bytes()
        self.by_formula += sum(self.expected.values(), Fraction(0))
        return loss


def lesson(rt: Runtime, o: HybridOptions) -> bool:
    """Compare the mesh with one device; with --explain also print the mesh, with --benchmark only time it."""
    o.check()
    mesh, out = o.mesh(rt), console(rt)
    if o.explain:
        hybrid = make_hybrid(rt, o, mesh)
        formula = StepBytes(hybrid, samples_of(o, hybrid), o.sequence, o.clip > 0)
        out.print(explain(hybrid, o.clip > 0), bytes_table(mesh, formula.all()))
        if not o.steps:
            return True
    if o.benchmark:
        report(rt, o, timed(rt, o, mesh))
        return True
    if o.precision != "full":
        raise UsageError(
            "--precision bfloat16 rounds otherwise than one device does; time it, with --benchmark --dtype float32"
        )
    proof, apart = Proof(DTYPES[o.dtype]), []  # type: tuple[Proof, list[str]]
    for optimizer in OPTIMIZERS:
        hybrid = make_hybrid(rt, o, mesh)
        run = Counted(
            mesh_step(hybrid, rt, o), StepBytes(hybrid, samples_of(o, hybrid), o.sequence, o.clip > 0)
        )
        expected, found = reference(rt, o, optimizer), follow(hybrid, optimizer, o.steps, run, mesh)
        proof.add(name_of(o, mesh), optimizer, expected, found, mesh, run.sent, run.by_formula)
        proof.elsewhere &= all(comm.everyones(run.agree, rt.world))
        apart += unequal_replicas(hybrid.named_parameters(), mesh)
    out.print(proof.tables(f"{title(mesh)}, {o.model}, {o.dtype}, {o.steps} steps"))
    out.print(bytes_table(mesh, run.expected, run.rows))
    report(rt, o, proof.recorded(timed(rt, replace(o, steps=5), mesh)))
    if apart:
        out.print(f"NOT the same bits on all ranks that hold it: {apart[0]}")
    out.print(proof.sentence())
    return proof.holds and not apart


def name_of(o: HybridOptions, mesh: Mesh) -> str:
    """Return the mesh's axes and its stage of ZeRO."""
    return title(mesh) + (f", ZeRO-{o.zero}" if o.zero else "")


def timed(
    rt: Runtime, o: HybridOptions, mesh: Mesh, beside: Mapping[str, Version] | None = None
) -> list[BenchmarkRecord]:
    """Time whole steps with AdamW: `o.steps` of them, after one to warm up.

    beside: other versions to time in turn with ours.
    """
    o = replace(o, batch=o.batch * rt.world_size) if o.benchmark and o.scaling == "weak" else o
    hybrid = make_hybrid(rt, o, mesh)
    batches, sent = Batches(o, hybrid.samples, rt.device), []
    formula, step = (
        StepBytes(hybrid, samples_of(o, hybrid), o.sequence),
        whole_step(hybrid.version(), batches, hybrid.tokens),
    )

    def ours() -> None:
        step()
        sent.append(sum(formula.all().values(), Fraction(0)))

    cases: dict[str, Callable[[], object]] = {name_of(o, mesh): ours}
    for name, version in (beside or {}).items():
        cases[name] = whole_step(version, batches, hybrid.tokens)
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    middle = statistics.median(sent[-o.steps :])
    return records(rt, o, measured, shape_of(o), dict.fromkeys(cases, middle), beside or (), axis="hybrid")
