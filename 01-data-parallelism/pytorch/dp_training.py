"""The training step of chapter 01: one global batch, cut over ranks and micro-batches, whatever synchronises it.

B samples of the global batch  S sequence
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.data.text import Text, lm_batch, load_text, rank_slice
from common.equality import OPTIMIZERS, Followed, Named, Wrap, compare, follow, plain, worst_of_world
from common.ledger import Ledger
from common.lesson import DTYPES, LessonOptions, console, write_records
from common.listen import Listener
from common.measure import BenchmarkRecord, Measured, in_turn, peak_memory
from common.mesh import Mesh
from common.models.transformer import Transformer, config, cross_entropy_sum
from common.proof import Proof
from common.runtime import Runtime, UsageError
from common.utils.visualizer import figure, throughput_bars

LARGEST_BATCH = 2**27  # tokens; more do not fit a machine that runs this


@dataclass
class TrainingOptions(LessonOptions):
    """Model and batch of the lessons of chapter 01."""

    model: str = "gpt2-tiny"
    """A name of common/models/configs.py."""
    batch: int = 10
    """Samples of the global batch; ranks take parts that differ by one sample at the most."""
    sequence: int = 32
    """Tokens of a sample."""
    micro_batches: int = 2
    """Parts into which each rank cuts its samples to accumulate gradients."""
    bucket_mb: float = 0.1
    """Size of a bucket in MiB."""
    benchmark: bool = False
    """Time steps in turn instead of proving equality."""
    scaling: Literal["strong", "weak"] = "strong"
    """With --benchmark: is --batch the batch of all ranks together, or of each?"""
    versions: tuple[str, ...] = ("naive", "bucketed", "ddp")
    """Which versions to run."""


@dataclass
class Version:
    """What a synchroniser of gradients offers to the training step."""

    model: nn.Module
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    finish: Callable[[], None] = lambda: None
    averages: bool = False  # DDP divides the sum by the number of ranks
    owner: Named | None = None  # has what the optimizer steps on, where that is not the model
    wrap: Wrap = plain

    def __post_init__(self) -> None:
        self.parameters = [p for _, p in (self.owner or self.model).named_parameters()]


@dataclass
class Batches:
    """This rank's part of every global batch."""

    options: TrainingOptions
    group: Group
    device: torch.device
    text: Text = field(init=False)

    def __post_init__(self) -> None:
        o = self.options
        if min(o.batch, o.sequence, o.micro_batches) < 1:
            raise UsageError(
                f"--batch {o.batch} --sequence {o.sequence} --micro-batches {o.micro_batches}: each must be at least 1"
            )
        if o.batch * o.sequence > LARGEST_BATCH or o.micro_batches > o.batch * o.sequence:
            raise UsageError(
                f"--batch {o.batch} --sequence {o.sequence} --micro-batches {o.micro_batches}: give at most "
                f"{LARGEST_BATCH} tokens, and no more micro-batches than tokens"
            )
        if self.group.size > o.batch:
            raise UsageError(
                f"--batch {o.batch} is too small for {self.group.size} ranks; "
                f"give at least {self.group.size}, so that each rank has a sample"
            )
        self.text = load_text(o.data)

    def parts(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """(tokens_BS, targets_BS) of each micro-batch; none of them is empty."""
        o = self.options
        lo, hi = rank_slice(o.batch, self.group.rank, self.group.size)
        cuts = min(o.micro_batches, hi - lo)
        slices = [rank_slice(hi - lo, i, cuts) for i in range(cuts)]
        batches = [
            lm_batch(self.text.train, o.seed, step, o.batch, o.sequence, lo + a, lo + b) for a, b in slices
        ]
        return [(tokens.to(self.device), targets.to(self.device)) for tokens, targets in batches]


def make_model(o: TrainingOptions, device: torch.device) -> Transformer:
    """The plain model, the same on every rank for the same seed."""
    return Transformer(config(o.model), o.seed, DTYPES[o.dtype]).to(device)


def training_step(version: Version, batches: Batches, group: Group) -> Callable[[int], Tensor]:
    """step(t): forward and backward of global step t; leaves summed gradients, returns the global loss."""

    def step(t: int) -> Tensor:
        parts = batches.parts(t)
        targets = torch.stack([y.ne(-100).sum() for _, y in parts]).sum()
        comm.all_reduce(targets, group)
        scale = (group.size if version.averages else 1) / targets.item()
        loss = torch.zeros((), dtype=version.parameters[0].dtype, device=batches.device)
        for i, (tokens_BS, targets_BS) in enumerate(parts):
            with version.no_sync() if i < len(parts) - 1 else nullcontext():
                total, _ = cross_entropy_sum(version.model(tokens_BS), targets_BS)
                (total * scale).backward()
                loss += total.detach()
        version.finish()
        comm.all_reduce(loss, group)
        return loss / targets.item()

    return step


def bytes_of_step(model: nn.Module, group: Group, flags: bool = True) -> Fraction:
    """Bytes a rank sends in a step, 2(n-1)/n of: gradients, a flag a parameter, the loss, the targets (8).

    DDP sends no flags.
    """
    parameters = list(model.parameters())
    numbers = sum(p.numel() for p in parameters) + flags * len(parameters) + 1
    return Fraction(2 * (group.size - 1) * (numbers * parameters[0].element_size() + 8), group.size)


def bytes_of_run(model: nn.Module, group: Group, steps: int, order: bool, flags: bool = True) -> Fraction:
    """Bytes a rank sends in a whole run.

    At the start (n-1)/n of the model and, with `order`, of 8 bytes a parameter for the order of the buckets;
    then the steps, each with the 8 bytes of its gradient norm, all-reduced.
    """
    parameters = list(model.parameters())
    start = sum(p.numel() * p.element_size() for p in parameters) + order * 8 * len(parameters)
    norms = Fraction(2 * (group.size - 1) * 8, group.size)
    return Fraction((group.size - 1) * start, group.size) + steps * (
        bytes_of_step(model, group, flags) + norms
    )


Formula = Callable[[str, nn.Module, Group, Any], Fraction]  # version, model, group, the lesson's options


def benchmark(
    rt: Runtime,
    o: TrainingOptions,
    make_version: Callable[..., Version],
    step_bytes: Formula,
    unseen: Collection[str] = ("ddp",),
    make_batches: Callable[..., Batches] = Batches,
) -> list[BenchmarkRecord]:
    """Whole steps, AdamW included, of every version in turn; `o.steps` rounds after two to warm up.

    step_bytes: the bytes a rank sends in a step by formula. unseen: versions whose messages and waits pass the
    ledger by.
    """
    weak = o.benchmark and o.scaling == "weak"
    o = replace(o, batch=o.batch * rt.world_size) if weak else o
    batches = make_batches(o, rt.world, rt.device)
    cases: dict[str, Callable[[], object]] = {}
    for name in o.versions:
        model = make_model(o, rt.device)
        cases[name] = whole_step(make_version(name, model, rt, o), batches, rt.world)
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    formula = {name: step_bytes(name, model, rt.world, o) for name in measured}
    return records(rt, o, measured, model, formula, unseen)


def records(
    rt: Runtime,
    o: TrainingOptions,
    measured: Mapping[str, Measured],
    model: nn.Module,
    step_bytes: Mapping[str, Fraction | int],
    unseen: Collection[str] = (),
    steps: int = 1,
) -> list[BenchmarkRecord]:
    """What was measured, a record a version. A round was `steps` steps; the records are of one."""
    assert isinstance(model, Transformer)
    tokens, memory = o.batch * o.sequence, peak_memory(rt.world)
    return [
        BenchmarkRecord(
            strategy="dp",
            implementation=name,
            language="pytorch",
            ranks=rt.world_size,
            backend=rt.backend,
            dtype=o.dtype,
            model=o.model,
            parameters=model.parameter_count(),
            tokens_per_step=tokens,
            flop_per_step=tokens * model.flops_per_token(o.sequence),
            step_seconds=[seconds / steps for seconds in m.seconds],
            communication_seconds=None if name in unseen else statistics.median(m.blocked) / steps,
            bytes_counted=None if name in unseen else statistics.median(m.sent) / steps,
            bytes_formula=float(step_bytes[name]),
            peak_memory_bytes=memory,
            scaling=o.scaling,
        )
        for name, m in measured.items()
    ]


def whole_step(version: Version, batches: Batches, group: Group) -> Callable[[], None]:
    """step(): zero_grad, forward, backward, AdamW, on the next batch."""
    optimizer = version.wrap(lambda tensors: torch.optim.AdamW(tensors, lr=1e-3), version.parameters)
    step, at = training_step(version, batches, group), itertools.count()

    def whole() -> None:
        optimizer.zero_grad()
        step(next(at))
        optimizer.step()

    return whole


def timing_table(records: list[BenchmarkRecord]) -> Table:
    """Median step time of each version, its spread, the share blocked in communication, and the speed."""
    first = records[0]
    title = (
        f"a step in turn: {first.model}, {first.dtype}, {first.ranks} ranks, {first.tokens_per_step:,} tokens"
    )
    table = Table(title=title, title_justify="left")
    for column in ("version", "ms (median)", "spread", "blocked in communication", "tokens/s", "GFLOP/s"):
        table.add_column(column, justify="left" if column == "version" else "right")
    for r in records:
        median = statistics.median(r.step_seconds)
        spread = (max(r.step_seconds) - min(r.step_seconds)) / median
        blocked = "-" if r.communication_seconds is None else f"{r.communication_seconds / median:.1%}"
        speed = (f"{r.tokens_per_step / median:,.0f}", f"{r.flop_per_step / median / 1e9:.1f}")
        table.add_row(r.implementation, f"{median * 1e3:.1f}", f"{spread:.0%}", blocked, *speed)
    return table


def report(rt: Runtime, o: TrainingOptions, records: list[BenchmarkRecord]) -> None:
    """On rank 0: the table, the records of --json, the picture of --plot."""
    console(rt).print(timing_table(records))
    if rt.rank == 0:
        write_records(o.json, [r.as_json() for r in records])
        if o.plot:
            speeds = {
                r.implementation: {r.ranks: r.tokens_per_step / statistics.median(r.step_seconds)}
                for r in records
            }
            with figure(o.plot) as (axes,):
                throughput_bars(axes, speeds, unit="tokens/s", title=f"{o.model}, {o.dtype}")


Examine = Callable[[str, str, Version, torch.optim.Optimizer], None]


def prove(
    rt: Runtime,
    o: TrainingOptions,
    make_version: Callable[..., Version],
    run_bytes: Formula,
    step_bytes: Formula,
    unseen: Collection[str] = ("ddp",),
    examine: Examine = lambda name, optimizer, version, made: None,
    make_batches: Callable[..., Batches] = Batches,
    one_device: Callable[[str, nn.Module, Any], Version] | None = None,
) -> bool:
    """Train with every version and optimizer, on all ranks and on one; show what differs and what it took.

    run_bytes, step_bytes: the bytes a rank sends in a run and in a step by formula. unseen: versions whose
    messages pass the ledger by. examine: sees each version after its last step, and its optimizer.
    one_device: what a version is compared with, where that is more than the plain model.
    """
    mesh, alone = Mesh(rt.world, dp=rt.world_size), Group("one", 0, 1, (rt.rank,))
    proof, ledgers = Proof(DTYPES[o.dtype]), {}
    for optimizer in OPTIMIZERS:
        references: dict[str, Followed] = {}
        for name in o.versions:
            compared = name if one_device else "plain"
            if compared not in references:
                model = make_model(o, rt.device)
                version = one_device(name, model, o) if one_device else Version(model)
                batches = make_batches(replace(o, micro_batches=1), alone, rt.device)
                step = training_step(version, batches, alone)
                references[compared] = follow(model, optimizer, o.steps, step, wrap=version.wrap)
            model = make_model(replace(o, seed=o.seed + rt.rank), rt.device)  # the broadcast must mend this
            # what passes the ledger by, the library's dispatcher sees
            with Listener(rt.world) if name in unseen else Ledger() as ledger:
                version = make_version(name, model, rt, o)
                step = training_step(version, make_batches(o, rt.world, rt.device), rt.world)
                owner = version.owner or model
                followed = follow(owner, optimizer, o.steps, step, mesh, version.wrap)
                found = compare(references[compared], followed)
            formula = run_bytes(name, model, rt.world, o)
            counted = ledger.bytes() - ledger.bytes("bookkeeping")
            proof.add(name, optimizer, worst_of_world(found, mesh), counted, formula)
            ledgers[name] = ledger
            examine(name, optimizer, version, followed.optimizer)
    out = console(rt)
    out.print(
        proof.tables(f"{rt.world_size} ranks against one device: {o.model}, {o.dtype}, {o.steps} steps")
    )
    shown = next((name for name in reversed(o.versions) if name not in unseen), o.versions[0])
    out.print(ledgers[shown].table(f"{shown}, {optimizer}: calls and seconds of rank 0, bytes mean"))
    records = benchmark(rt, replace(o, steps=5), make_version, step_bytes, unseen, make_batches)
    report(rt, o, [replace(r, equal=proof.equal, largest_difference=proof.largest) for r in records])
    out.print(proof.sentence())
    return proof.holds


def check(rt: Runtime, known: tuple[str, ...], o: TrainingOptions) -> None:
    """Refuse what cannot run, before any rank waits for another."""
    for name in o.versions:
        if name not in known:
            raise UsageError(f"--versions {name!r} is unknown; choose from {', '.join(known)}")
    if not o.versions:
        raise UsageError(f"--versions is empty; choose from {', '.join(known)}")
    if not 1e-6 <= o.bucket_mb < math.inf:
        raise UsageError(f"--bucket-mb {o.bucket_mb:g}: give MiB, at least 1e-6 (one byte), such as 8")
    if o.steps < 1:
        raise UsageError(f"--steps {o.steps}: at least 1 is needed")
    if o.plot and o.plot.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {o.plot}: the name must end in .png, .svg or .pdf")
