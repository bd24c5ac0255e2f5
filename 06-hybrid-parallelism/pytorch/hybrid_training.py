"""Shared parts of the lessons of chapter 06: runs on a mesh and on one device, their proof and their times."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from typing import Literal

import torch
from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger, Row
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.comparison import records, report
from common.lesson.equality import (
    OPTIMIZERS,
    Followed,
    MakeOptimizer,
    Start,
    unequal_replicas,
    watch,
    with_units,
)
from common.lesson.job import SAMPLE_AXES, Batch, Job, Train, one_device
from common.lesson.measure import BenchmarkRecord, in_turn
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console
from common.lesson.training import make_model, shape_of, timed_adamw
from common.models.transformer import Transformer

from dp_zero import Zero
from hybrid_bytes import Bytes, StepBytes
from hybrid_explain import bytes_table, explain, label, title
from hybrid_layout import HybridOptions, TorchOptions, check_torch
from hybrid_model import Hybrid
from plan_here import peak_table


def make_hybrid(rt: Runtime, o: HybridOptions, mesh: Mesh) -> Hybrid:
    """Make the model of the options on the mesh."""
    return Hybrid(o.model_config(), mesh, o, rt.device, DTYPES[o.dtype], o.seed)


@dataclass
class HybridJob(Job[HybridOptions]):
    """Training run on a mesh: a model on "meta" at first, and each step's bytes beside the formula."""

    ledger: Ledger = field(default_factory=Ledger)
    agree: bool = True
    """True if all steps so far sent the bytes of the formula, in every group."""
    sent: Fraction = Fraction(0)
    by_formula: Fraction = Fraction(0)
    rows: list[Row] = field(default_factory=list)
    """The ledger's rows of the last step."""
    expected: Bytes = field(default_factory=dict)
    """Bytes of the last step by formula and group."""

    @cached_property
    def group(self) -> Group:
        """The ranks that have samples of their own."""
        return self.mesh.group(*SAMPLE_AXES)

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's samples of every global batch; the messages of a step are those that follow."""
        for batch in super().batches():
            self.ledger.rows.clear()
            yield batch

    def count(self, run: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the losses of `run`; after each step, compare its bytes with the formula, for each group."""
        with Ledger() as self.ledger:
            for t, loss in enumerate(run):
                self.rows, self.expected = list(self.ledger.rows), self.formula().all(first=t == 0)
                counted: Bytes = defaultdict(Fraction)
                for row in self.rows:
                    counted[row.axis] += row.bytes
                self.agree &= {axis: sent for axis, sent in counted.items() if sent} == self.expected
                self.sent += sum(counted.values(), Fraction(0))
                self.by_formula += sum(self.expected.values(), Fraction(0))
                yield loss

    def formula(self) -> StepBytes:
        """Return the byte formula of the model that the training loop has made."""
        zero = getattr(self.owner, "zero", self.owner)  # of a Hybrid, or beside a model in another language
        assert isinstance(zero, Zero)
        return StepBytes(self.model, zero, self.mesh, self.options, self.options.clip > 0)


def make_job(
    rt: Runtime, o: HybridOptions, mesh: Mesh, make: MakeOptimizer, steps: int | None = None
) -> HybridJob:
    """Return a run on the mesh, with the optimizer that `make` makes. steps: default: no limit."""
    version = (
        title(mesh) + (f", ZeRO-{o.zero}" if o.zero else "") + ("" if o.overlap else ", sums afterwards")
    )
    return HybridJob(rt, o, version, shape_of(o), mesh, "dp", make, steps)


def train(job: Job[HybridOptions]) -> Iterator[Tensor]:
    """Train a Hybrid; yield the loss of each global batch."""
    o = job.options
    hybrid = make_hybrid(job.rt, o, job.mesh)
    job.model = hybrid.model
    optimizer = job.optimizer(hybrid.zero)
    for batch in job.batches():
        optimizer.zero_grad()
        loss = hybrid.step(*batch.whole(), at=(batch.step, batch.first_samples[0]))
        if o.clip:
            hybrid.clip(o.clip)
        optimizer.step()
        yield loss


def alone(rt: Runtime, o: HybridOptions, model: Transformer, make: MakeOptimizer) -> Job[HybridOptions]:
    """Return the run of the plain model on one device, in one micro-batch, with torch's clipping."""
    if o.precision == "bfloat16":
        model.forward = torch.autocast(rt.device.type, torch.bfloat16)(model.forward)  # type: ignore[method-assign]

    def clipping(tensors: list[Tensor]) -> torch.optim.Optimizer:
        def clip(*_: object) -> None:
            if o.clip:
                nn.utils.clip_grad_norm_(tensors, o.clip)

        optimizer = make(tensors)
        optimizer.register_step_pre_hook(clip)
        return optimizer

    whole, mesh = replace(o, micro_batches=1), Mesh(Group.alone())
    return Job(rt, whole, "plain", model, mesh, "dp", clipping, o.steps)


def reference(rt: Runtime, o: HybridOptions, optimizer: str) -> Followed:
    """Train on one device; return losses, gradients, norms and weights, with the units of `in_ulps`."""

    def run(start: Start) -> Followed:
        job = alone(rt, o, start(make_model(o, rt.device)), OPTIMIZERS[optimizer])
        return watch(one_device(job), job)

    return with_units(run)


def prove_mesh(
    rt: Runtime, o: HybridOptions, mesh: Mesh, loop: Train, expected: Callable[[str], Followed]
) -> tuple[Proof, list[str], HybridJob]:
    """Train with both optimizers on the mesh, and compare with one device.

    expected: the run on one device with an optimizer of that name. Returns the proof, the names of parameters
    whose replicas differ between ranks, and the last run.
    """
    proof, apart = Proof(mesh, DTYPES[o.dtype]), list[str]()
    for optimizer, make in OPTIMIZERS.items():
        job = make_job(rt, o, mesh, make, o.steps)
        found = watch(job.count(loop(job)), job, mesh)
        proof.add(job.version, optimizer, expected(optimizer), found, job.sent, job.by_formula)
        proof.elsewhere &= all(comm.everyones(job.agree, rt.world))
        assert job.owner is not None
        apart += unequal_replicas(job.owner.named_parameters(), mesh)
    return proof, apart, job


def lesson(rt: Runtime, o: HybridOptions, loop: Train) -> bool:
    """Compare a training loop on the mesh with one device; --explain also prints the mesh.

    The times, and with --benchmark only these are taken, are those of a Hybrid, which makes the same calls.
    """
    o.validate()
    o = replace(o, batch=o.batch * rt.world_size) if o.benchmark and o.scaling == "weak" else o
    mesh, out = o.mesh(rt), console(rt)
    if o.explain:
        hybrid = make_hybrid(rt, o, mesh)
        formula = StepBytes(hybrid.model, hybrid.zero, mesh, o, o.clip > 0)
        peak = peak_table(o, o.model_config(), mesh.shape, o.dtype, o.batch, o.sequence)
        out.print(explain(hybrid, o.clip > 0), peak, bytes_table(mesh, formula.all()))
        if not o.steps:
            return True
    if o.benchmark:
        report(rt, o, found := benchmark(rt, o, mesh))
        out.print(waits_table(mesh, found))
        return True
    if o.precision != "full":
        raise UsageError(
            "--precision bfloat16 rounds otherwise than one device does; time it, with --benchmark --dtype float32"
        )
    proof, apart, job = prove_mesh(rt, o, mesh, loop, partial(reference, rt, o))
    out.print(proof.tables(f"{title(mesh)}, {o.model}, {o.dtype}, {o.steps} steps"))
    out.print(bytes_table(mesh, job.expected, job.rows))
    report(rt, o, proof.recorded(benchmark(rt, replace(o, steps=5), mesh)))
    if apart:
        out.print(f"NOT the same bits on all ranks that hold it: {apart[0]}")
    out.print(proof.sentence())
    return proof.holds and not apart


def beside_torch(rt: Runtime, o: TorchOptions, loop: Train) -> bool:
    """Compare a training loop of torch's parts with one device, and time it in turn with a Hybrid.

    With --benchmark only the times are taken. The Hybrid has the stage of ZeRO that FSDP2 is equivalent to.
    """
    mesh, out = o.mesh(rt), console(rt)
    check_torch(o, mesh)
    zero: Literal[0, 1, 2] = 0 if mesh.shape["dp"] == 1 else 1 if mesh.shape["pp"] > 1 else 2
    o, name = replace(o, zero=o.zero or zero), f"{title(mesh)}, torch"
    if o.benchmark:
        report(rt, o, benchmark(rt, o, mesh, {name: loop}))
        return True
    # full_tensor, which only the comparison calls, warns that it takes two messages where one would do
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    proof = Proof(mesh, DTYPES[o.dtype])
    for optimizer, make in OPTIMIZERS.items():
        job = Job(rt, o, name, make_model(o, rt.device), mesh, "dp", make, o.steps)
        proof.add(
            name, optimizer, reference(rt, o, optimizer), watch(loop(job), job, mesh), None, Fraction(0)
        )
    out.print(proof.tables(f"{title(mesh)} of torch, {o.model}, {o.dtype}, {o.steps} steps"))
    report(rt, o, proof.recorded(benchmark(rt, replace(o, steps=5), mesh, {name: loop})))
    out.print(proof.sentence())
    return proof.holds


def waits_table(mesh: Mesh, records: list[BenchmarkRecord]) -> Table:
    """Return a table of the exposed communication: milliseconds per step that a rank is blocked along each axis."""
    waits: dict[str, dict[str, float]] = {}
    for r in records:
        of = waits.setdefault(r.implementation, defaultdict(float))
        for axis, seconds in (r.seconds_by_axis or {}).items():
            of[label(axis, mesh)] += 1e3 * seconds
    axes = sorted({axis for of in waits.values() for axis in of})
    title = "exposed: ms of a step that a rank is blocked, the mean over the ranks"
    table = make_table(title, ("version", *(f">{axis}" for axis in axes), ">all"))
    for name, of in waits.items():
        table.add_row(name, *(f"{ms:.1f}" for ms in (*(of[axis] for axis in axes), sum(of.values()))))
    return table


def benchmark(
    rt: Runtime, o: HybridOptions, mesh: Mesh, beside: Mapping[str, Train] | None = None
) -> list[BenchmarkRecord]:
    """Time whole steps of a Hybrid with AdamW: `o.steps` of them, after one to warm up.

    Without overlap, one with overlap takes turns with it. beside: other training loops to time in turn with it, each
    of a whole model.
    """
    sent, cases = list[Fraction](), dict[str, Callable[[], object]]()

    def step(job: HybridJob, run: Iterator[Tensor]) -> None:
        next(run)
        sent.append(sum(job.formula().all().values(), Fraction(0)))

    for layout in {o.overlap: o, True: replace(o, overlap=True)}.values():
        ours = make_job(rt, layout, mesh, timed_adamw)
        cases[ours.version] = partial(step, ours, train(ours))
    for name, loop in (beside or {}).items():
        job = Job(rt, o, name, make_model(o, rt.device), mesh, "dp", timed_adamw)
        cases[name] = partial(next, loop(job))
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    middle = statistics.median(sent[-o.steps :])
    return records(rt, o, measured, dict.fromkeys(cases, middle), beside or (), "hybrid")
