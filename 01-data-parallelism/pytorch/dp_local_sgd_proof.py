"""Proof of dp_local_sgd.py: replicas beside those of one device, times beside data parallelism, loss against bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn

from common.comm import Group
from common.comm.ledger import show_bytes
from common.comm.mesh import Mesh
from common.data.text import lm_batch
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.comparison import records, report
from common.lesson.equality import OPTIMIZERS, with_units
from common.lesson.job import Job, Train, one_device
from common.lesson.measure import BenchmarkRecord, in_turn
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console
from common.lesson.training import Batches, make_model, shape_of
from common.models.transformer import cross_entropy_sum
from common.utils.visualizer import colour, figure, loss_curves

import dp_basic
from dp_costs import bytes_of_start, bytes_of_step
from dp_replicas import LocalOptions, mean_of_replicas, simulated
from dp_training import on_one_device, on_ranks

Versions = Mapping[str, Train]


def bytes_of_meeting(model: nn.Module, group: Group, counts: bool = True) -> Fraction:
    """Return the bytes a rank sends per meeting: 2(n-1)/n of the model and, with `counts`, one number."""
    parameters = list(model.parameters())
    numbers = sum(p.numel() for p in parameters) + counts
    return Fraction(2 * (group.size - 1) * numbers * parameters[0].element_size(), group.size)


def bytes_formula(model: nn.Module, group: Group, o: LocalOptions, counts: bool = True) -> Fraction:
    """Return the bytes a rank sends in a run: the broadcast of the model, and the meetings."""
    meetings = o.steps // o.every * bytes_of_meeting(model, group, counts)
    return bytes_of_start(model, group, order=False) + meetings


def prove_local_sgd(rt: Runtime, o: LocalOptions, versions: Versions) -> bool:
    """Compare each version with n replicas on one device, and SGD with H = 1 with plain training."""
    proof, model = Proof(Mesh(rt.world, dp=rt.world_size), DTYPES[o.dtype]), shape_of(o)
    name, every_step, whole = "local-sgd", replace(o, every=1), replace(o, micro_batches=1)
    seen, job, counted = on_ranks(rt, every_step, versions[name], name, "sgd", replicas=True)
    mean, formula = mean_of_replicas(seen, job), bytes_formula(model, rt.world, every_step)
    plain = with_units(partial(on_one_device, rt, whole, one_device, "plain", "sgd"))
    proof.add("H = 1: plain", "sgd", plain, mean, counted, formula)
    # torch's averager has no weights, so it gets equal parts, of sequences too short to be padded
    even = replace(o, batch=max(1, o.batch // rt.world_size) * rt.world_size, sequence=min(o.sequence, 3))
    for optimizer in OPTIMIZERS:
        for name in o.versions:
            given = even if name == "torch" else o
            seen, _, sent = on_ranks(rt, given, versions[name], name, optimizer, ("torch",), replicas=True)
            formula = bytes_formula(model, rt.world, o, counts=name != "torch")
            proof.add(name, optimizer, simulated(name, optimizer, rt, given), seen, sent, formula)
    out = console(rt)
    out.print(
        proof.tables(
            f"{rt.world_size} ranks, {rt.world_size} replicas on one device, H = {o.every}, {o.model}, {o.dtype}, "
            f"{o.steps} steps"
        )
    )
    report(rt, replace(o, plot=None), proof.recorded(timed(rt, replace(o, steps=5), versions)))
    if o.plot:
        curves(rt, o, versions)
    out.print(proof.sentence())
    return proof.holds


def timed(rt: Runtime, o: LocalOptions, versions: Versions) -> list[BenchmarkRecord]:
    """Time rounds of H steps with AdamW in turn, beside data parallelism; the records are per step."""
    o = replace(o, batch=o.batch * rt.world_size) if o.benchmark and o.scaling == "weak" else o
    mesh, cases = Mesh(rt.world, dp=rt.world_size), dict[str, Callable[[], object]]()
    for name, train in {"every-step": dp_basic.train, **versions}.items():
        if name in ("every-step", *o.versions) and name != "torch":
            model = make_model(o, rt.device)
            run = train(Job(rt, o, name, model, mesh, "dp", OPTIMIZERS["adamw"]))
            cases[name] = partial(take, run, o.every)
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    formula = dict.fromkeys(measured, bytes_of_meeting(model, rt.world) / o.every)
    formula["every-step"] = bytes_of_step(model, rt.world)
    return records(rt, o, {name: m.per_step(o.every) for name, m in measured.items()}, formula)


def take(run: Iterator[Tensor], steps: int) -> None:
    """Let a training loop do some steps."""
    for _ in itertools.islice(run, steps):
        pass


def validation_loss(model: nn.Module, batches: Batches) -> float:
    """Return the mean loss over 64 samples that are never trained on."""
    o = batches.options
    tokens_BS, targets_BS = lm_batch(batches.text.validation, o.seed, 0, 64, o.sequence, 0, 64)
    with torch.no_grad():
        total, targets = cross_entropy_sum(model(tokens_BS.to(batches.device)), targets_BS.to(batches.device))
    return (total / targets).item()


def curves(rt: Runtime, o: LocalOptions, versions: Versions) -> None:
    """Train data parallelism, local SGD and DiLoCo at each H, by AdamW; show loss against bytes per step."""
    o = replace(o, steps=o.curve_steps)
    losses: dict[str, list[float]] = {}
    title = f"{o.steps} steps, AdamW inside, {rt.world_size} ranks"
    table = make_table(title, ("version", ">bytes a step", ">times less", ">loss on validation text"))
    model, batches = make_model(o, rt.device), Batches(o, rt.world, rt.device)
    mesh = Mesh(rt.world, dp=rt.world_size)
    job = Job(rt, o, "every step", model, mesh, "dp", OPTIMIZERS["adamw"], o.steps)
    losses["every step"] = [loss.item() for loss in dp_basic.train(job)]
    plain = bytes_of_step(model, rt.world)
    rows = [("every step", plain, validation_loss(model, batches))]
    for name in ("local-sgd", "diloco"):
        for every in o.periods:
            given, label = replace(o, every=every), f"{name}, H = {every}"
            seen, job, _ = on_ranks(rt, given, versions[name], name, "adamw", replicas=True)
            losses[label] = mean_of_replicas(seen, job).losses
            sent = bytes_of_meeting(job.model, rt.world) / every
            rows.append((label, sent, validation_loss(job.model, batches)))
    for label, sent, loss in rows:
        times = float(plain / sent) if sent else 1.0
        table.add_row(label, show_bytes(sent), f"{times:.1f}", f"{loss:.3f}")
    console(rt).print(table)
    if rt.rank == 0 and o.plot:
        with figure(o.plot, columns=2, width=11, height=4.2) as (left, right):
            middle = f"H = {o.periods[len(o.periods) // 2]}"
            drawn = {
                label: losses[label] for label in losses if "H = " not in label or label.endswith(middle)
            }
            loss_curves(left, drawn, title=f"{o.model}, {rt.world_size} ranks, mean of 16 steps", mean=16)
            kinds = list(dict.fromkeys(label.split(",")[0] for label, *_ in rows))
            for label, sent, loss in rows:
                right.plot(float(sent), loss, "o", color=colour(kinds.index(label.split(",")[0])))
                right.annotate(label, (float(sent), loss), (5, 4), textcoords="offset points", fontsize=8)
            right.set(
                xscale="log", xlabel="bytes a step and rank", xmargin=0.2, ylabel="loss on validation text"
            )
