"""What the lessons of chapter 06 share: their options, the mesh, the proof against one device."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Annotated, Literal

import torch
from hybrid_bytes import StepBytes
from hybrid_check import check
from hybrid_explain import bytes_table, explain, title
from hybrid_model import Hybrid, Layout, Schedule
from sp_sequence_parallel import Attention
from torch import Tensor, nn

from common import comm
from common.comm import sizes_of
from common.comparison import one_rank, records, report
from common.data.text import rank_slice
from common.equality import OPTIMIZERS, Followed, Start, follow, unequal_replicas, with_units
from common.errors import UsageError
from common.ledger import Ledger, Row
from common.lesson import DTYPES, console
from common.measure import BenchmarkRecord, in_turn
from common.mesh import Mesh
from common.options import Ranks, Size, Within
from common.proof import Proof
from common.runtime import Runtime
from common.training import (
    Batches,
    TrainingOptions,
    Version,
    make_model,
    shape_of,
    training_step,
    whole_step,
)


@dataclass
class HybridOptions(TrainingOptions, without=("versions",)):
    """Mesh, layout, model and batch of the lessons of chapter 06."""

    steps: Annotated[int, Within(0, 10**9)] = 3
    """Training steps."""
    model: str = "mixtral-tiny"
    """A name of common/models/configs.py."""
    batch: Size = 16
    """Samples of the global batch; places along dp and ep take parts that differ by one sample at the most."""
    pp: Ranks = 1
    """Ranks along pp: stages of layers."""
    dp: Ranks | None = None
    """Ranks along dp: replicas of the batch; all ranks that the other axes leave when left out."""
    ep: Ranks = 1
    """Ranks along ep: experts, and one more axis of samples."""
    sp: Ranks = 1
    """Ranks along sp: pieces of the sequence."""
    tp: Ranks = 1
    """Ranks along tp: pieces of each matrix."""
    schedule: Schedule = "1f1b"
    """What the stages do in which order."""
    chunks: Annotated[int, Within(1, 1000)] = 2
    """Stages of each rank, where the schedule is interleaved."""
    attention: Attention = "zigzag"
    """How ranks along sp attend to one another's tokens."""
    sequence_parallel: bool = False
    """Megatron's: between the regions of tp each of its ranks has a slice of the tokens."""
    zero: Literal[0, 1, 2, 3] = 0
    """What ranks along dp share out: 1 optimizer states, 2 gradients too, 3 weights too."""
    checkpointing: bool = False
    """Keep the input of each layer alone and compute the layer again for its backward pass."""
    precision: Literal["full", "bfloat16"] = "full"
    """Type in which products are computed; full is that of the weights."""
    clip: Annotated[float, Within(0, 1e30)] = 0.0
    """Largest norm of the gradient; 0 leaves it as it is."""
    explain: bool = False
    """Print the mesh, each rank's place and memory, the groups, the bytes of a step; with --steps 0 nothing else."""

    def check(self) -> None:
        """Raises UsageError for options that contradict one another. A configuration file may give them one by one."""
        if not self.steps and not self.explain:
            raise UsageError("--steps 0: give at least 1; 0 goes with --explain, and then nothing is trained")

    def layout(self) -> Layout:
        """How the axes split. Raises UsageError."""
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
        """The mesh of all ranks. Raises UsageError where the axes' product is not their number."""
        others = self.pp * self.ep * self.sp * self.tp
        dp = max(1, rt.world_size // others) if self.dp is None and others > 0 else self.dp or 0
        return Mesh(rt.world, self.pp, dp, self.ep, self.sp, self.tp, rt.timeout)


def make_hybrid(rt: Runtime, o: HybridOptions, mesh: Mesh) -> Hybrid:
    """The model of the options on the mesh. Raises UsageError where it does not fit, on all ranks alike."""
    check(o.model_config(), mesh, o.layout(), o.batch, o.sequence)
    return Hybrid(o.model_config(), mesh, o.layout(), rt.device, DTYPES[o.dtype], o.seed)


Step = Callable[[int], Tensor]


def mesh_step(hybrid: Hybrid, rt: Runtime, o: HybridOptions) -> Step:
    """step(t) on the mesh: synchronised, clipped gradients; returns the loss of the global batch."""
    step = training_step(hybrid.version(), Batches(o, hybrid.samples, rt.device), hybrid.tokens)

    def clipped(t: int) -> Tensor:
        loss = step(t)
        if o.clip:
            hybrid.clip(o.clip)
        return loss

    return clipped


def one_device_step(model: nn.Module, rt: Runtime, o: HybridOptions) -> Step:
    """The same on one device with the plain model, the batch in one piece, with torch's clipping."""
    alone = one_rank(rt)
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
    """What one device leaves, with units."""

    def run(start: Start) -> Followed:
        model = start(make_model(o, rt.device))
        return follow(model, optimizer, o.steps, one_device_step(model, rt, o))

    return with_units(run)


def samples_of(o: HybridOptions, hybrid: Hybrid) -> list[int]:
    """How many samples are in each of this rank's micro-batches."""
    group = hybrid.samples
    lo, hi = rank_slice(o.batch, group.rank, group.size)
    return sizes_of(hi - lo, o.micro_batches)


@dataclass
class Counted:
    """A step whose messages are held, each time and for each group, against the formula."""

    step: Step
    formula: StepBytes
    agree: bool = True
    sent: Fraction = Fraction(0)
    by_formula: Fraction = Fraction(0)
    rows: list[Row] = field(default_factory=list)
    expected: Mapping[str, Fraction] = field(default_factory=dict)

    def __call__(self, t: int) -> Tensor:
        """Step t; `rows` and `expected` are of the last one."""
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
    """The model on the mesh against one device; with --explain the mesh, too, with --benchmark the time alone."""
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
    """The mesh, and its stage of ZeRO."""
    return title(mesh) + (f", ZeRO-{o.zero}" if o.zero else "")


def timed(
    rt: Runtime, o: HybridOptions, mesh: Mesh, beside: Mapping[str, Version] | None = None
) -> list[BenchmarkRecord]:
    """Whole steps with AdamW; `o.steps` of them after one to warm up. beside: others to time in turn with ours."""
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
