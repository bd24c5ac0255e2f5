"""What the lessons of chapter 02 share: options, the model under a schedule, its bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, Literal

import torch
from pp_bubble import waits
from pp_pipeline import Pipeline
from pp_schedules import KINDS, make_schedule
from pp_stages import by_cost, evenly, measured_costs
from torch import nn

from common import comm, comparison
from common.comm import Group
from common.comparison import benchmark, prove, report
from common.errors import UsageError
from common.lesson import DTYPES
from common.mesh import Mesh
from common.models.transformer import Transformer
from common.options import Size, Within
from common.runtime import Runtime
from common.training import Batches, TrainingOptions, Version


@dataclass
class PipelineOptions(TrainingOptions):
    """Model, batch and schedule of the lessons of chapter 02."""

    model: str = "gpt2-deep"
    """A name of common/models/configs.py."""
    batch: Size = 11
    """Samples of the batch; all pass every stage."""
    micro_batches: Size = 8
    """Parts into which the batch is cut; they differ by one sample at the most."""
    chunks: Annotated[int, Within(1, 1000)] = 2
    """Stages of each rank in the interleaved schedule."""
    balance: Literal["layers", "cost"] = "layers"
    """Stages of equally many layers, or of equal time, as rank 0 measures it for layers, embeddings and head."""
    checkpointing: bool = False
    """Keep the input of each layer alone, and compute the layer again for its backward pass."""


@dataclass
class InOrderOptions(PipelineOptions, without=("chunks",)):
    """Options of the schedules that fix the number of stages of a rank."""


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
    c = o.model_config()
    if c.positions == "learned" and o.sequence > c.sequence:
        raise UsageError(
            f"--sequence {o.sequence} is too long for {o.model}, which has {c.sequence} learned positions"
        )
    if o.micro_batches > o.batch:
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
    right, beside = True, replace(o, plot=None)  # the picture is of the waits
    if o.benchmark:
        report(rt, beside, benchmark(rt, o, make_version, step_bytes, (), make_batches, axis="pp"))
    else:
        right = prove(
            rt, beside, make_version, run_bytes, step_bytes, (), make_batches=make_batches, axis="pp"
        )
    schedules = [make_schedule(name, rt.world_size, o.micro_batches, o.chunks) for name in o.versions]
    waits(rt, o, schedules, partial(make_pipeline, rt=rt, o=o), make_batches(o, rt.world, rt.device))
    return right
