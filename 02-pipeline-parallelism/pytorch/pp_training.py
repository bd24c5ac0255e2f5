"""Shared parts of the lessons of chapter 02: options, the model under a schedule, its bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Annotated, Literal

import torch
from torch import nn

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Size, Within
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.comparison import Lesson, by_version, prove, time_in_turn
from common.lesson.runner import DTYPES
from common.lesson.training import Batches, TrainingOptions, Version
from common.models.transformer import Transformer

from pp_bubble import waits
from pp_pipeline import Pipeline
from pp_schedules import KINDS, make_schedule
from pp_stages import by_cost, evenly, measured_costs


@dataclass
class PipelineOptions(TrainingOptions):
    """Options of the lessons of chapter 02: model, batch and schedule."""

    model: str = "gpt2-deep"
    """A name of common/models/configs.py."""
    batch: Size = 11
    """Number of samples in the batch; all pass through every stage."""
    micro_batches: Size = 8
    """Number of parts into which the batch is cut; they differ by at most one sample."""
    chunks: Annotated[int, Within(1, 1000)] = 2
    """Number of stages per rank in the interleaved schedule."""
    balance: Literal["layers", "cost"] = "layers"
    """Stages of equally many layers, or of equal time by rank 0's measurement of layers, embeddings, head."""
    checkpointing: bool = False
    """Keep only the input of each layer, and recompute the layer for its backward pass."""


@dataclass
class InOrderOptions(PipelineOptions, without=("chunks",)):
    """Options of the schedules that fix the number of stages per rank."""


def make_pipeline(name: str, model: Transformer, rt: Runtime, o: PipelineOptions) -> Pipeline:
    """Return the model in stages on all ranks of the world."""
    mesh = Mesh(rt.world, pp=rt.world_size, timeout=rt.timeout)
    schedule = make_schedule(name, rt.world_size, o.micro_batches, o.chunks)
    cuts = None
    if o.balance == "cost":
        part = make_batches(o, rt.world, rt.device).parts(0)[0]
        layers, before, after = comm.everyones(measured_costs(model, *part), rt.world)[0]
        cuts = by_cost(layers, schedule.stages, before, after)
    return Pipeline(model, mesh, schedule, cuts, o.checkpointing)


def make_version(name: str, model: Transformer, rt: Runtime, o: PipelineOptions) -> Version:
    """Return the version of the schedule `name`, in the form that the training step needs."""
    pipe = make_pipeline(name, model, rt, o)
    return Version(model, run=pipe.run, finish=pipe.finish)


def make_batches(o: PipelineOptions, group: Group, device: torch.device) -> Batches:
    """Return batches with every sample on every rank: the first stage reads tokens, the last one targets."""
    return Batches(o, Group.alone(), device)


def check(rt: Runtime, o: PipelineOptions) -> None:
    """Raise UsageError for options that cannot run, before any rank waits for another."""
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
    """Return the bytes this rank sends in a step.

    They are B S D numbers for each side on which a stage has a neighbour on another rank; the loss (one
    number, all-reduced); and the gradient of a tied head on the two ranks that have it.
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


def lesson(rt: Runtime, o: PipelineOptions, *names: str) -> bool:
    """Prove and time some schedules; then print their bubbles, by formula, simulated and measured."""
    o = replace(o, versions=o.versions or names)
    comparison.check(rt, names, o)
    check(rt, o)
    proved = Lesson("pp", dict.fromkeys(names, by_version(make_version, make_batches)), step_bytes)
    right, beside = True, replace(o, plot=None)  # --plot draws the timelines of `waits`
    if o.benchmark:
        time_in_turn(rt, beside, proved)
    else:
        right = prove(rt, beside, proved)
    schedules = [make_schedule(name, rt.world_size, o.micro_batches, o.chunks) for name in o.versions]
    waits(rt, o, schedules, partial(make_pipeline, rt=rt, o=o), make_batches(o, rt.world, rt.device))
    return right
