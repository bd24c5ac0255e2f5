"""Talk less often: every rank trains by itself, and every H steps all of them meet.

    H steps on rank r    w_r ← inner optimizer(w_r, gradient of its own part)        no message at all
    then                 Δ = sum over ranks of T_r/T (w - w_r)                       T_r: targets it has seen
                         m ← μ m + Δ        w ← w - η (Δ + μ m)        w_r ← w

    rank 0    w ─ step ─ step ─ step ─ w₀ ─┐ all-reduce ┌─ w ─ step ─ step ─ step ─ …
                                           ├──── Δ ─────┤
    rank 1    w ─ step ─ step ─ step ─ w₁ ─┘            └─ w ─ step ─ step ─ step ─ …

    local SGD (arXiv:1805.09767)   η = 1, μ = 0: w becomes the average of the w_r
    DiLoCo    (arXiv:2311.08105)   inner AdamW; η = 0.7, μ = 0.9: an outer step of Nesterov momentum on Δ

With H = 1, inner SGD, η = 1 and μ = 0 this is data parallelism to the last digit but rounding. Otherwise it is another
algorithm, and the proof is against one device that loops over n replicas.

Cost: 2(n-1)/n of the model every H steps in place of every step. Memory: w and m, two more models a rank (one for
local SGD). Not averaged: the inner optimizer's state and the model's buffers; each rank keeps its own.

    python dp_local_sgd.py --nproc 4    torchrun --nproc_per_node=4 dp_local_sgd.py
    mpirun -np 4 python dp_local_sgd.py                  with --plot curves.png: loss against bytes, H = 4, 16, 64
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from dp_basic import DataParallel, broadcast_model
from dp_training import (
    Batches,
    TrainingOptions,
    Version,
    bytes_of_step,
    check,
    make_model,
    training_step,
)
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from common import comm
from common.comm import Group, share
from common.data.text import lm_batch
from common.equality import OPTIMIZERS, Followed, compare, follow, worst_of_world
from common.ledger import Ledger, show_bytes
from common.lesson import DTYPES, console, run
from common.mesh import Mesh
from common.models.transformer import cross_entropy_sum
from common.proof import Proof
from common.runtime import Runtime, UsageError
from common.utils.visualizer import colour, figure, loss_curves

VERSIONS = ("local-sgd", "diloco", "torch")
Parts = list[tuple[Tensor, Tensor]]


class LocalSGD:
    """The meetings of replicas that train by themselves.

        local = LocalSGD(model, group, every=500, rate=0.7, momentum=0.9)      # DiLoCo's outer step
        loss(...).backward()                # the mean over this rank's own targets
        optimizer.step()
        local.step(targets)                 # how many those were

    Between meetings the ranks' weights differ: meet() before they are saved or judged. Ranks may see unequal parts,
    but each makes every step. Parameters that a rank did not use take part with what they are.
    Raises ValueError for `every` below 1.
    """

    def __init__(
        self, model: nn.Module, group: Group, every: int, rate: float = 1.0, momentum: float = 0.0
    ) -> None:
        if every < 1:
            raise ValueError(f"every {every} steps: ranks meet after 1 step or more")
        broadcast_model(model, group)
        self.parameters, self.group, self.every = list(model.parameters()), group, every
        self.rate, self.momentum = rate, momentum
        self.w = joined(self.parameters)
        self.m = torch.zeros_like(self.w) if momentum else self.w.new_zeros(())
        self.steps = self.targets = 0

    def step(self, targets: int) -> None:
        """Count a step; meet after every H of them."""
        self.steps, self.targets = self.steps + 1, self.targets + targets
        if self.steps % self.every == 0:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """Average where the ranks have gone, take the outer step, and go on from there together."""
        moved = (self.w - joined(self.parameters)) * self.targets
        moved = torch.cat([moved, moved.new_tensor([self.targets])])  # the sum of the weights rides along
        comm.all_reduce(moved, self.group)
        delta = moved[:-1] / moved[-1]
        self.m = self.momentum * self.m + delta if self.momentum else self.m
        self.w -= self.rate * (delta + self.momentum * self.m)
        pieces = self.w.split([p.numel() for p in self.parameters])
        for p, piece in zip(self.parameters, pieces, strict=True):
            p.copy_(piece.view_as(p))
        self.targets = 0


def joined(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of all numbers, one after the other."""
    return torch.cat([t.detach().flatten() for t in tensors])


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Parts, seen: Followed) -> int:
    """One step on this replica's own part of the batch, noted in `seen`; returns the number of its targets."""
    targets, loss = sum(int(y.ne(-100).sum()) for _, y in parts), 0.0
    optimizer.zero_grad()
    for tokens_BS, targets_BS in parts:
        total, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
        (total / targets).backward()
        loss += total.item() / targets
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    seen.losses.append(loss)
    seen.gradients.append(gradients)
    seen.norms.append(joined(gradients.values()).norm().item())
    optimizer.step()
    return targets


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass
class LocalOptions(TrainingOptions):
    """How often the ranks meet."""

    steps: int = 5
    """Training steps; where H does not divide them, the replicas are compared between two meetings."""
    every: int = 2
    """H: steps between two meetings."""
    rate: float = 0.7
    """DiLoCo's outer learning rate η."""
    momentum: float = 0.9
    """DiLoCo's outer momentum μ."""
    curve_steps: int = 192
    """With --plot: steps of the loss curves."""
    periods: tuple[int, ...] = (4, 16, 64)
    """With --plot: values of H."""
    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


def outer(name: str, o: LocalOptions) -> tuple[float, float]:
    """η and μ of a version."""
    return (o.rate, o.momentum) if name == "diloco" else (1.0, 0.0)


def on_ranks(
    name: str, optimizer: str, rt: Runtime, o: LocalOptions
) -> tuple[Followed, list[int], list[Tensor], Fraction]:
    """This rank's replica as it went, its targets of each step, its last weights, and the bytes it sent."""
    model = make_model(replace(o, seed=o.seed + rt.rank), rt.device)  # the broadcast must mend this
    batches, seen, targets = Batches(o, rt.world, rt.device), Followed(), list[int]()
    chosen = OPTIMIZERS[optimizer](list(model.parameters()))
    with Ledger() as ledger:
        if name == "torch":
            broadcast_model(model, rt.world)
            averager = PeriodicModelAverager(
                o.every, o.every - 1, rt.world.pg
            )  # the first after H steps, not after 1
            chosen = PostLocalSGDOptimizer(chosen, averager)
        else:
            local = LocalSGD(model, rt.world, o.every, *outer(name, o))
        for t in range(o.steps):
            targets.append(local_step(model, chosen, batches.parts(t), seen))
            if name != "torch":
                local.step(targets[-1])
    seen.weights = weights(model)
    return seen, targets, list(model.parameters()), ledger.bytes()


def simulated(name: str, optimizer: str, rt: Runtime, o: LocalOptions) -> Followed:
    """One device that keeps n replicas and steps them in turn; what it saw of this rank's."""
    n, (rate, momentum) = rt.world_size, outer(name, o)
    models = [make_model(o, rt.device) for _ in range(n)]
    chosen = [OPTIMIZERS[optimizer](list(model.parameters())) for model in models]
    groups = [Group("replica", r, n, tuple(range(n))) for r in range(n)]
    batches, seen = Batches(o, groups[0], rt.device), [Followed() for _ in range(n)]
    w, m = weights(models[0]), {name: torch.zeros_like(p) for name, p in weights(models[0]).items()}
    targets = [0] * n
    for t in range(o.steps):
        for r, batches.group in enumerate(groups):
            targets[r] += local_step(models[r], chosen[r], batches.parts(t), seen[r])
        if (t + 1) % o.every == 0:
            there = [weights(model) for model in models]
            for name in w:
                average = sum((there[r][name] * targets[r] for r in range(n)), torch.zeros_like(w[name]))
                delta = w[name] - average / sum(targets)
                m[name] = momentum * m[name] + delta
                w[name] = w[name] - rate * (delta + momentum * m[name])
                for model in models:
                    model.get_parameter(name).data.copy_(w[name])
            targets = [0] * n
    seen[rt.rank].weights = weights(models[rt.rank])
    return seen[rt.rank]


def mean_of_replicas(seen: Followed, targets: list[int], group: Group) -> Followed:
    """What the ranks saw as if it were one: losses and gradients averaged by targets; the weights as they are."""
    mean = Followed(weights=seen.weights)
    for loss, gradients, count in zip(seen.losses, seen.gradients, targets, strict=True):
        flat = joined(gradients.values())
        flat = torch.cat([flat, flat.new_tensor([loss, 1.0])])
        flat *= count
        comm.all_reduce(flat, group)
        flat /= flat[-1].clone()
        pieces = flat[:-2].split([g.numel() for g in gradients.values()])
        mean.losses.append(flat[-2].item())
        mean.norms.append(flat[:-2].norm().item())
        mean.gradients.append(
            {name: piece.view_as(g) for (name, g), piece in zip(gradients.items(), pieces, strict=True)}
        )
    return mean


def bytes_of_meeting(model: nn.Module, group: Group, counts: bool = True) -> Fraction:
    """2(n-1)/n of the model and, where parts are weighed, of the count of targets."""
    whole = joined(model.parameters())
    return share(torch.cat([whole, whole[:1]]) if counts else whole, 2, group)


def bytes_formula(model: nn.Module, group: Group, o: LocalOptions, counts: bool = True) -> Fraction:
    """The model once, broadcast, and the meetings."""
    start = share(joined(model.parameters()), 1, group)
    return start + o.steps // o.every * bytes_of_meeting(model, group, counts)


def prove(rt: Runtime, o: LocalOptions) -> bool:
    """Each version against one device with n replicas; with H = 1 and SGD against plain training on one device."""
    mesh, alone, proof = Mesh(rt.world, dp=rt.world_size), Group("one", 0, 1, (0,)), Proof(DTYPES[o.dtype])
    every_step = replace(o, every=1)
    model = make_model(o, rt.device)
    formula = bytes_formula(model, rt.world, every_step)
    batches = Batches(replace(o, micro_batches=1), alone, rt.device)
    reference = follow(model, "sgd", o.steps, training_step(Version(model), batches, alone))
    seen, targets, _, counted = on_ranks("local-sgd", "sgd", rt, every_step)
    found = compare(reference, mean_of_replicas(seen, targets, rt.world))
    proof.add("H = 1: plain", "sgd", worst_of_world(found, mesh), counted, formula)
    # torch does not weigh: it gets equal parts
    even = replace(o, batch=max(1, o.batch // rt.world_size) * rt.world_size)
    for optimizer in OPTIMIZERS:
        for name in o.versions:
            given = even if name == "torch" else o
            seen, _, _, sent = on_ranks(name, optimizer, rt, given)
            found = worst_of_world(compare(simulated(name, optimizer, rt, given), seen), mesh)
            formula = bytes_formula(model, rt.world, o, counts=name != "torch")
            proof.add(name, optimizer, found, None if name == "torch" else sent, formula)
    out = console(rt)
    out.print(
        proof.tables(
            f"{rt.world_size} ranks against one device with {rt.world_size} replicas, H = {o.every}: "
            f"{o.model}, {o.dtype}, {o.steps} steps"
        )
    )
    if o.plot:
        curves(rt, o)
    out.print(proof.sentence())
    return proof.holds


def validation_loss(model: nn.Module, batches: Batches) -> float:
    """Mean over 64 samples that are never trained on."""
    o = batches.options
    tokens_BS, targets_BS = lm_batch(batches.text.validation, o.seed, 0, 64, o.sequence, 0, 64)
    with torch.no_grad():
        total, _ = cross_entropy_sum(model(tokens_BS.to(batches.device)), targets_BS.to(batches.device))
    return total.item() / targets_BS.numel()


def curves(rt: Runtime, o: LocalOptions) -> None:
    """Train with AdamW: data parallelism, then both versions at each H; loss against bytes a step."""
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
            seen, targets, parameters, _ = on_ranks(name, "adamw", rt, given)
            for p, q in zip(model.parameters(), parameters, strict=True):
                p.data.copy_(q.data)
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
            loss_curves(left, losses, title=f"{o.model}, {rt.world_size} ranks")
            for place, (label, sent, loss) in enumerate(rows):
                right.plot(float(sent), loss, "o", color=colour(place))
                right.annotate(label, (float(sent), loss), (5, 3), textcoords="offset points", fontsize=8)
            right.set(xscale="log", xlabel="bytes a step and rank", ylabel="loss on validation text")


def main(rt: Runtime, o: LocalOptions) -> bool:
    """Prove, or refuse what cannot be."""
    check(rt, VERSIONS, o)
    if o.benchmark:
        raise UsageError("--benchmark: this lesson is about bytes against loss; --plot shows them")
    for name, every, steps in (
        ("--every", o.every, o.steps),
        *(("--periods", h, o.curve_steps) for h in o.periods if o.plot),
    ):
        if every < 1:
            raise UsageError(f"{name} {every}: ranks meet after 1 step or more, such as 10")
        if every > steps:
            raise UsageError(f"{name} {every}: the run ends after {steps} steps, before the first meeting")
    if not (0 < o.rate < math.inf and 0 <= o.momentum < 1):
        raise UsageError(
            f"--rate {o.rate:g} --momentum {o.momentum:g}: the rate must be above 0, the momentum from 0 to below 1"
        )
    if rt.world_size == 1:  # torch's averager needs a process group
        o = replace(o, versions=tuple(name for name in o.versions if name != "torch"))
    return prove(rt, o)


if __name__ == "__main__":
    run(main, LocalOptions)
