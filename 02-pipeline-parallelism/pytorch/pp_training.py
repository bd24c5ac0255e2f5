"""What the lessons of chapter 02 share: options, the model under a schedule, its bytes and its bubble."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from pp_checker import held
from pp_pipeline import Pipeline
from pp_schedule import COMPUTE, Instruction
from pp_schedules import KINDS, bubble, make_schedule
from pp_simulator import Event, Timeline, simulate
from pp_stages import by_cost, evenly, measured_costs
from rich.table import Table
from torch import Tensor, nn

from common import comm, comparison
from common.comm import Group
from common.comparison import benchmark, one_rank, prove, report
from common.lesson import DTYPES, console
from common.mesh import Mesh
from common.models.transformer import Transformer
from common.runtime import Runtime, UsageError
from common.training import Batches, TrainingOptions, Version, make_model, training_step
from common.utils.visualizer import Interval, figure, timeline


@dataclass
class PipelineOptions(TrainingOptions):
    """Model, batch and schedule of the lessons of chapter 02."""

    model: str = "gpt2-deep"
    """A name of common/models/configs.py."""
    batch: int = 11
    """Samples of the batch; all pass every stage."""
    micro_batches: int = 8
    """Parts into which the batch is cut; they differ by one sample at the most."""
    chunks: int = 2
    """Stages of each rank in the interleaved schedule."""
    balance: Literal["layers", "cost"] = "layers"
    """Stages of equally many layers, or of equal time, as rank 0 measures it for layers, embeddings and head."""
    checkpointing: bool = False
    """Keep the input of each layer alone, and compute the layer again for its backward pass."""


def make_pipeline(name: str, model: Transformer, rt: Runtime, o: PipelineOptions) -> Pipeline:
    """The model in stages on all ranks of the world."""
    mesh = Mesh(rt.world, pp=rt.world_size, timeout=rt.timeout)
    schedule = make_schedule(name, rt.world_size, o.micro_batches, o.chunks)
    cuts = None
    if o.balance == "cost":
        part = make_batches(o, rt.world, rt.device).parts(0)[0]
        layers, before, after = comm.everyones(measured_costs(model, *part), rt.world)[0]
        cuts = by_cost(layers, schedule.stages, before, after)
    return Pipeline(model, mesh, schedule, cuts, o.checkpointing)


def make_version(name: str, model: Transformer, rt: Runtime, o: PipelineOptions) -> Version:
    """The training step's view of it."""
    pipe = make_pipeline(name, model, rt, o)
    return Version(model, run=pipe.run, finish=pipe.finish)


def make_batches(o: PipelineOptions, group: Group, device: torch.device) -> Batches:
    """Every sample on every rank: the first stage reads the tokens, the last one the targets."""
    return Batches(o, Group("one", 0, 1, (0,)), device)


def check(rt: Runtime, o: PipelineOptions) -> None:
    """Refuse what cannot run, before any rank waits for another."""
    if o.chunks < 1:
        raise UsageError(f"--chunks {o.chunks}: a rank needs at least 1 stage")
    c = o.model_config()
    if c.positions == "learned" and o.sequence > c.sequence:
        raise UsageError(
            f"--sequence {o.sequence} is too long for {o.model}, which has {c.sequence} learned positions"
        )
    if o.batch < 1:
        raise UsageError(f"--batch {o.batch}: at least 1 is needed")
    if not 1 <= o.micro_batches <= o.batch:
        raise UsageError(
            f"--batch {o.batch} cannot be cut into {o.micro_batches} micro-batches; give between 1 and {o.batch}"
        )
    chunks = [KINDS[name].chunks or o.chunks for name in o.versions if name in KINDS]
    evenly(c.layers, rt.world_size * max(chunks, default=1))


def step_bytes(name: str, model: nn.Module, group: Group, o: PipelineOptions) -> Fraction:
    """Bytes this rank sends in a step: B S D for each side on which a stage has a neighbour elsewhere.

    Beside that the loss (one number, all-reduced), and the gradient of a tied head on the two ranks that have it.
    """
    assert isinstance(model, Transformer)
    c, size, kind = model.config, DTYPES[o.dtype].itemsize, KINDS[name]
    owner = kind.owner(group.size, kind.chunks or o.chunks)
    borders = [(a, b) for a, b in itertools.pairwise(owner) if a != b]
    sides = sum(group.rank in border for border in borders)
    sent = Fraction(sides * o.batch * o.sequence * c.width * size)
    if c.tied and owner[0] != owner[-1] and group.rank in (owner[0], owner[-1]):
        sent += c.vocabulary * c.width * size
    return sent + Fraction(2 * (group.size - 1) * size, group.size)


def run_bytes(name: str, model: nn.Module, group: Group, o: PipelineOptions) -> Fraction:
    """Bytes this rank sends in `o.steps` steps, each with the 8 bytes of its gradient norm, all-reduced."""
    return o.steps * (step_bytes(name, model, group, o) + Fraction(2 * (group.size - 1) * 8, group.size))


def lesson(rt: Runtime, o: PipelineOptions, *names: str) -> bool:
    """Proof, bytes and times of some schedules; then what they wait, by formula, simulated and measured."""
    o = replace(o, versions=o.versions or names)
    comparison.check(rt, names, o)
    check(rt, o)
    right = True
    if o.benchmark:
        report(
            rt, replace(o, plot=None), benchmark(rt, o, make_version, step_bytes, (), make_batches, axis="pp")
        )
    else:
        plot, o = o.plot, replace(o, plot=None)
        right = prove(rt, o, make_version, run_bytes, step_bytes, (), make_batches=make_batches, axis="pp")
        o = replace(o, plot=plot)
    waits(rt, o)
    return right


class Runs(Protocol):
    """What Pipeline offers, and the two stages of pp_manual.py."""

    @property
    def events(self) -> list[Event]:
        """What this rank computed in the last run, and when."""

    def run(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Forward and backward of all micro-batches; the sum of their losses."""

    def finish(self) -> None:
        """After the backward passes."""


def waits(rt: Runtime, o: PipelineOptions) -> None:
    """The bubble of each schedule, four times, and what ranks hold; with --plot the last one's timelines."""
    table = Table(
        title=f"{rt.world_size} ranks, {o.micro_batches} micro-batches: share of the time that is bubble"
    )
    table.title_justify = "left"
    for column in (
        "schedule",
        "formula",
        "simulated",
        "with measured times",
        "measured",
        "chunks held by rank",
    ):
        table.add_column(column, justify="right" if column != "schedule" else "left")
    for name in o.versions:
        schedule = make_schedule(name, rt.world_size, o.micro_batches, o.chunks)
        measured = measure(partial(make_pipeline, name), rt, o)
        equal, expected = simulate(schedule), simulate(schedule, durations(measured).__getitem__)
        formula = bubble(name, rt.world_size, o.micro_batches, o.chunks)
        table.add_row(
            name,
            f"{float(formula):.1%}" if formula is not None else "-",
            *(f"{float(line.bubble):.1%}" for line in (equal, expected, measured)),
            " ".join(str(held(schedule, rank)) for rank in range(schedule.ranks)),
        )
    console(rt).print(table)
    if o.plot and rt.rank == 0:
        draw(o.plot, {f"{name}, simulated": expected, f"{name}, measured": measured})


def measure(make: Callable[..., Runs], rt: Runtime, o: PipelineOptions, rounds: int = 3) -> Timeline:
    """The timeline of a training step, of `rounds` the shortest, after one to warm up. All ranks on one host."""
    runs = make(model := make_model(o, rt.device), rt, o)
    batches = make_batches(o, rt.world, rt.device)
    step = training_step(Version(model, run=runs.run, finish=runs.finish), batches, one_rank(rt))
    lines = []
    for t in range(rounds + 1):
        comm.barrier(rt.world)
        step(t)
        everyones = comm.everyones(runs.events, rt.world)
        lines.append(Timeline(rt.world_size, tuple(event for events in everyones for event in events)))
    return min(lines[1:], key=lambda line: line.length)


def durations(measured: Timeline) -> Mapping[Instruction, float]:
    """What each computation took, the median over the micro-batches."""
    took: dict[tuple[str, int], list[float]] = {}
    for e in measured.events:
        took.setdefault((e.instruction.op, e.instruction.stage), []).append(float(e.end - e.start))
    medians = {key: statistics.median(values) for key, values in took.items()}
    return {e.instruction: medians[e.instruction.op, e.instruction.stage] for e in measured.events}


def draw(path: Path, lines: Mapping[str, Timeline]) -> None:
    """Timelines, one above the other."""
    ranks = max(line.ranks for line in lines.values())
    with figure(path, rows=len(lines), width=9.0, height=len(lines) * (1.1 + 0.3 * ranks)) as axes:
        for ax, (name, line) in zip(axes, lines.items(), strict=True):
            title = f"{name}: {float(line.bubble):.1%} bubble"
            kinds = [
                k for k in COMPUTE if any(e.instruction.op == k for one in lines.values() for e in one.events)
            ]
            timeline(ax, rows(line), unit="ms", scale=1e3, kinds=kinds, title=title)


def rows(line: Timeline) -> dict[str, list[Interval]]:
    """What the visualizer draws: micro-batches as labels."""
    begin = min(e.start for e in line.events)
    return {
        f"rank {rank}": [interval(e, begin) for e in line.events if e.rank == rank]
        for rank in range(line.ranks)
    }


def interval(e: Event, begin: float | Fraction) -> Interval:
    """One computation."""
    return Interval(float(e.start - begin), float(e.end - begin), e.instruction.op, str(e.instruction.micro))
