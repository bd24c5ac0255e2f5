"""Local SGD: each rank trains a replica by itself, and every H steps the ranks meet to average.

    H steps on rank r    w_r ← inner optimizer(w_r, gradient of its own part)        no messages
    then                 Δ = sum over ranks of T_r/T (w - w_r)                       T_r of T targets seen
                         m ← μ m + Δ        w ← w - η (Δ + μ m)        w_r ← w

    rank 0    w ─ step ─ step ─ step ─ w₀ ─┐ all-reduce ┌─ w ─ step ─ step ─ step ─ …
                                           ├──── Δ ─────┤
    rank 1    w ─ step ─ step ─ step ─ w₁ ─┘            └─ w ─ step ─ step ─ step ─ …

    local SGD (arXiv:1805.09767)   η = 1, μ = 0: w becomes the average of the w_r
    DiLoCo    (arXiv:2311.08105)   inner AdamW; η = 0.7, μ = 0.9: an outer step of Nesterov momentum on Δ

With H = 1, inner SGD, η = 1 and μ = 0 this equals data parallelism up to rounding. Otherwise it is another
algorithm, and we compare it with one device that loops over n replicas.

Cost: a rank sends 2(n-1)/n of the model every H steps instead of every step. Memory: w and m, two more models
per rank (one for local SGD). The inner optimizer's state and the model's buffers are not averaged; each rank
keeps its own.

    python dp_local_sgd.py --nproc 4    torchrun --nproc_per_node=4 dp_local_sgd.py
    mpirun -np 4 python dp_local_sgd.py                  with --plot curves.png: loss against bytes, H = 4, 16, 64
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch
from rich.table import Table
from torch import nn

from common.comm import Group, share
from common.comm.ledger import show_bytes
from common.comm.mesh import Mesh
from common.data.text import lm_batch
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.comparison import records, report
from common.lesson.equality import OPTIMIZERS, Followed, Start, follow, with_units
from common.lesson.measure import BenchmarkRecord, in_turn
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console, run
from common.lesson.training import Batches, Version, make_model, training_step
from common.models.transformer import cross_entropy_sum
from common.utils.visualizer import colour, figure, loss_curves

from dp_basic import DataParallel
from dp_replicas import (
    VERSIONS,
    LocalOptions,
    joined,
    mean_of_replicas,
    on_ranks,
    replica,
    simulated,
)
from dp_training import bytes_of_step, check


def bytes_of_meeting(model: nn.Module, group: Group, counts: bool = True) -> Fraction:
    """Return the bytes a rank sends per meeting: 2(n-1)/n of the model and, with `counts`, one number."""
    whole = joined(model.parameters())
    return share(torch.cat([whole, whole[:1]]) if counts else whole, 2, group)


def bytes_formula(model: nn.Module, group: Group, o: LocalOptions, counts: bool = True) -> Fraction:
    """Return the bytes a rank sends in a run: the broadcast of the model, and the meetings."""
    start = share(joined(model.parameters()), 1, group)
    return start + o.steps // o.every * bytes_of_meeting(model, group, counts)


def prove(rt: Runtime, o: LocalOptions) -> bool:
    """Compare each version with n replicas on one device, and SGD with H = 1 with plain training."""
    mesh, alone, proof = Mesh(rt.world, dp=rt.world_size), Group.alone(), Proof(DTYPES[o.dtype])
    every_step = replace(o, every=1)
    batches = Batches(replace(o, micro_batches=1), alone, rt.device)

    def plain(start: Start) -> Followed:
        model = start(make_model(o, rt.device))
        return follow(model, "sgd", o.steps, training_step(Version(model), batches, alone))

    model = make_model(o, rt.device)
    seen, targets, _, counted = on_ranks("local-sgd", "sgd", rt, every_step)
    mean, formula = mean_of_replicas(seen, targets, rt.world), bytes_formula(model, rt.world, every_step)
    proof.add("H = 1: plain", "sgd", with_units(plain), mean, mesh, counted, formula)
    # torch's averager has no weights, so it gets equal parts, of sequences too short to be padded
    even = replace(o, batch=max(1, o.batch // rt.world_size) * rt.world_size, sequence=min(o.sequence, 3))
    for optimizer in OPTIMIZERS:
        for name in o.versions:
            given = even if name == "torch" else o
            seen, _, _, sent = on_ranks(name, optimizer, rt, given)
            formula = bytes_formula(model, rt.world, o, counts=name != "torch")
            proof.add(name, optimizer, simulated(name, optimizer, rt, given), seen, mesh, sent, formula)
    out = console(rt)
    out.print(
        proof.tables(
            f"{rt.world_size} ranks, {rt.world_size} replicas on one device, H = {o.every}, {o.model}, {o.dtype}, "
            f"{o.steps} steps"
        )
    )
    report(rt, replace(o, plot=None), proof.recorded(timed(rt, replace(o, steps=5))))
    if o.plot:
        curves(rt, o)
    out.print(proof.sentence())
    return proof.holds


def timed(rt: Runtime, o: LocalOptions) -> list[BenchmarkRecord]:
    """Time rounds of H steps with AdamW in turn, beside data parallelism; the records are per step."""
    o = replace(o, batch=o.batch * rt.world_size) if o.benchmark and o.scaling == "weak" else o
    model, batches = make_model(o, rt.device), Batches(o, rt.world, rt.device)
    dp = DataParallel(model, rt.world, o.bucket_mb)
    gradients = training_step(Version(model, dp.no_sync, dp.finish), batches, rt.world)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))

    def every_step(t: int) -> None:
        optimizer.zero_grad()
        gradients(t)
        optimizer.step()

    steps: dict[str, Callable[[int], object]] = {"every-step": every_step}
    steps |= {name: replica(name, "adamw", rt, o)[1] for name in o.versions if name != "torch"}
    measured = in_turn(
        {name: partial(one_round, step, o.every) for name, step in steps.items()},
        o.steps,
        rt.world,
        device=rt.device.type,
    )
    formula = dict.fromkeys(measured, bytes_of_meeting(model, rt.world) / o.every)
    formula["every-step"] = bytes_of_step(model, rt.world)
    return records(rt, o, measured, model, formula, steps=o.every)


def one_round(step: Callable[[int], object], every: int) -> None:
    """Run steps 0 to `every` - 1."""
    for t in range(every):
        step(t)


def validation_loss(model: nn.Module, batches: Batches) -> float:
    """Return the mean loss over 64 samples that are never trained on."""
    o = batches.options
    tokens_BS, targets_BS = lm_batch(batches.text.validation, o.seed, 0, 64, o.sequence, 0, 64)
    with torch.no_grad():
        total, targets = cross_entropy_sum(model(tokens_BS.to(batches.device)), targets_BS.to(batches.device))
    return (total / targets).item()


def curves(rt: Runtime, o: LocalOptions) -> None:
    """Train data parallelism, local SGD and DiLoCo at each H, by AdamW; show loss against bytes per step."""
    o = replace(o, steps=o.curve_steps)
    losses: dict[str, list[float]] = {}
    table = Table(title=f"{o.steps} steps, AdamW inside, {rt.world_size} ranks", title_justify="left")
    for column in ("version", "bytes a step", "times less", "loss on validation text"):
        table.add_column(column, justify="left" if column == "version" else "right")
    model, batches = make_model(o, rt.device), Batches(o, rt.world, rt.device)
    dp = DataParallel(model, rt.world, o.bucket_mb)
    step = training_step(Version(model, dp.no_sync, dp.finish), batches, rt.world)
    losses["every step"] = follow(model, "adamw", o.steps, step).losses
    plain = bytes_of_step(model, rt.world)
    rows = [("every step", plain, validation_loss(model, batches))]
    for name in ("local-sgd", "diloco"):
        for every in o.periods:
            given = replace(o, every=every)
            seen, targets, model, _ = on_ranks(name, "adamw", rt, given)
            label = f"{name}, H = {every}"
            losses[label] = mean_of_replicas(seen, targets, rt.world).losses
            sent = bytes_of_meeting(model, rt.world) / every
            rows.append((label, sent, validation_loss(model, batches)))
    for label, sent, loss in rows:
        times = float(plain / sent) if sent else 1.0
        table.add_row(label, show_bytes(sent), f"{times:.1f}", f"{loss:.3f}")
    console(rt).print(table)
    if rt.rank == 0 and o.plot:
        with figure(o.plot, columns=2, width=11, height=4.2) as (left, right):
            loss_curves(left, losses, title=f"{o.model}, {rt.world_size} ranks, mean of 16 steps", mean=16)
            for place, (label, sent, loss) in enumerate(rows):
                right.plot(float(sent), loss, "o", color=colour(place))
                right.annotate(label, (float(sent), loss), (5, 4), textcoords="offset points", fontsize=8)
            right.set(
                xscale="log", xlabel="bytes a step and rank", xmargin=0.2, ylabel="loss on validation text"
            )


def main(rt: Runtime, o: LocalOptions) -> bool:
    """Prove equality with replicas on one device, or with --benchmark time the versions."""
    check(rt, VERSIONS, o)
    for name, every, steps in (
        ("--every", o.every, o.steps),
        *(("--periods", h, o.curve_steps) for h in o.periods if o.plot),
    ):
        if every > steps:
            raise UsageError(f"{name} {every}: the run ends after {steps} steps, before the first meeting")
    if rt.world_size == 1:  # torch's averager needs a process group
        o = replace(o, versions=tuple(name for name in o.versions if name != "torch"))
    if not o.benchmark:
        return prove(rt, o)
    report(rt, o, timed(rt, o))
    return True


if __name__ == "__main__":
    run(main, LocalOptions)
