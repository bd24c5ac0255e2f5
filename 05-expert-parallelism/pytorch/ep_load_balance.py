"""Keeping experts busy alike: a loss on the global batch's load, or a bias that no gradient moves.

    load over training: rows are steps, columns experts, the darker the more tokens

          none             switch, gshard            bias
    0     ▒ ▒ ▓ ░ ▒ ▒      ▒ ▒ ▓ ░ ▒ ▒               ▒ ▒ ▓ ░ ▒ ▒       f_e  share of the choices that fell on e
    20    █ ░   ░ ▓ ░      ▓ ▒ ▒ ▒ ▓ ▒               ▓ ▒ ▒ ▒ ▒ ▒       P_e  mean of the router's scores for e
    40    █       █        ▒ ▒ ▒ ▒ ▓ ▒               ▒ ▒ ▒ ▒ ▒ ▒       both over all tokens of the global batch

    switch    loss + a E sum_e f_e P_e            arXiv:2101.03961, eq. 4-6; with k > 1 all choices count
    gshard    the same with f_e of the first choices alone    arXiv:2006.16668, algorithm 1 (its loss is 1/E^2 of this)
    bias      a token chooses the k largest s_e + b_e and weighs with s_e; after each step
              b_e += u sign(mean load - load_e)   DeepSeek-V3, arXiv:2412.19437, eq. 16; arXiv:2408.15664

f has no gradient (it counts), P has: the loss pushes scores down where f is large. With even load it is 1. Since f and
P multiply, a mean of means is wrong: the average of f P over ranks or micro-batches is another loss, which asks every
small part to be balanced (Qiu et al., arXiv:2501.11873). So counts are summed over all ranks and micro-batches first,
and then each part of P gets its gradient. Tokens that a capacity will drop count like all others, or the loss would not
see an overload. f is known only after the last micro-batch's forward pass: here all graphs are kept until then, so that
micro-batches save no memory. The alternatives are a forward pass for counting, or the counts of the step before.

Cost: an all-reduce of 2 E integers a layer. The bias costs nothing else, and leaves the gradients alone.

    python ep_load_balance.py --nproc 2 --plot balance.png    torchrun --nproc_per_node=2 ep_load_balance.py
    mpirun -np 2 python ep_load_balance.py

B batch  S sequence  L layers  E experts  K choices of a token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, cast

import torch
from ep_moe import Lesson, MoEOptions, check_split
from ep_training import check_micro_batches, drain, load, mixtures, observed
from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comparison import check, prove
from common.lesson import console, run
from common.models.moe import Routing
from common.models.transformer import cross_entropy_sum
from common.options import Within
from common.runtime import Runtime
from common.training import Batches, Version, make_model, training_step
from common.utils.visualizer import figure, load_map

VERSIONS = ("none", "switch", "gshard", "bias")


@dataclass
class BalanceOptions(MoEOptions, without=("capacity_factor", "benchmark", "scaling")):
    """What balances, and how strongly."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""
    coefficient: Annotated[float, Within(0, 1000)] = 0.01
    """a, of the loss; 0.01 as in Switch."""
    rate: Annotated[float, Within(0, 1000)] = 0.01
    """u, by which a bias moves in a step; DeepSeek-V3's is 0.001, for longer training."""
    curve_steps: Annotated[int, Within(0, 10**9)] = 80
    """Steps of the training whose loads are shown; 0 for none."""


def shares(scores_BSE: Tensor) -> Tensor:
    """Scores that sum to 1: softmax's do already, sigmoid's are divided."""
    return scores_BSE / scores_BSE.sum(-1, keepdim=True)


def balance_loss(routings: list[Routing], counts_E: Tensor) -> Tensor:
    """This rank's part of E sum_e f_e P_e: f of the global counts, P of the tokens here over those of all ranks.

    The parts of all ranks and micro-batches add up to the loss; counts_E: one choice a token, or several.
    """
    here_E = torch.stack([shares(r.scores_BSE).sum((0, 1)) for r in routings]).sum(0)
    f_E = counts_E.to(here_E) / counts_E.sum()
    return len(f_E) * (f_E * here_E).sum()


class Balance:
    """Runs the micro-batches of a step and balances the experts by what the whole global batch chose.

    group: the ranks that see different tokens. loads: of each step, [L, E].
    """

    def __init__(self, kind: str, model: nn.Module, group: Group, o: BalanceOptions) -> None:
        self.kind, self.model, self.group, self.o = kind, model, group, o
        self.seen, self.loads = observed(model), cast(list[Tensor], [])
        for moe in mixtures(model) if kind == "bias" else []:
            moe.router.choice_bias = torch.zeros_like(moe.router.weight[:, 0])

    def run(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """All forward passes, the counts of all ranks, one backward pass; the sum of the losses."""
        total = torch.zeros((), device=parts[0][-1].device)
        for i, (*inputs, targets_BS) in enumerate(parts):
            begin(i)
            total = total + cross_entropy_sum(self.model(*inputs), targets_BS)[0]
        layers = list(drain(self.seen))
        counts_L2E = self.counts(layers)
        comm.all_reduce(counts_L2E, self.group)
        if self.kind in ("switch", "gshard"):
            which = 0 if self.kind == "switch" else 1
            tokens = int(counts_L2E[0, 1].sum())  # each has one first choice
            for routings, counts_2E in zip(layers, counts_L2E, strict=True):
                part = balance_loss(routings, counts_2E[which]) / tokens
                total = total + self.o.coefficient * part / scale
        (total * scale).backward()
        if self.kind == "bias":
            self.move_biases(counts_L2E[:, 0])
        self.loads.append(counts_L2E[:, 0])
        return total.detach()

    def counts(self, layers: list[list[Routing]]) -> Tensor:
        """Choices and first choices of each expert here, int64 [L, 2, E]: what routers chose, served or dropped."""
        experts = [torch.cat([r.experts_BSK.flatten(0, 1) for r in routings]) for routings in layers]
        E = layers[0][0].scores_BSE.shape[-1]
        return torch.stack(
            [torch.stack([load(chosen_TK, E), load(chosen_TK[:, 0], E)]) for chosen_TK in experts]
        )

    def move_biases(self, loads_LE: Tensor) -> None:
        """Up where an expert had less than the mean, down where it had more."""
        for moe, load_E in zip(mixtures(self.model), loads_LE, strict=True):
            bias_E = cast(Tensor, moe.router.choice_bias)
            bias_E += self.o.rate * (load_E.double().mean() - load_E).sign().to(bias_E)


class BalanceLesson(Lesson):
    """Experts over all ranks, with balance."""

    def make_version(self, name: str, model: nn.Module, rt: Runtime, o: MoEOptions) -> Version:
        """The model with its experts over all ranks, balanced in this way."""
        assert isinstance(o, BalanceOptions)
        version = super().make_version(name, model, rt, o)
        self.balance = Balance(name, model, rt.world, o)
        return replace(version, run=self.balance.run)

    def steps_bytes(self, name: str, model: nn.Module, group: Group, o: MoEOptions) -> list[Fraction]:
        """As without balance, and the counts: 2 E integers a layer, all-reduced."""
        c = o.model_config()
        counts = Fraction(2 * (group.size - 1) * c.layers * 2 * c.experts * 8, group.size)
        return [sent + counts for sent in super().steps_bytes(name, model, group, o)]


def one_device(name: str, model: nn.Module, o: BalanceOptions) -> Version:
    """What a version must be equal to: the plain model, balanced by the whole batch."""
    for moe in mixtures(model):
        moe.capacity_factor = None
    return Version(model, run=Balance(name, model, Group("one", 0, 1, (0,)), o).run)


def imbalance(loads_LE: Tensor) -> float:
    """The most loaded expert over the mean, averaged over layers: 1 is even, E is all on one."""
    return (loads_LE.double().amax(1) / loads_LE.double().mean(1)).mean().item()


def train(rt: Runtime, o: BalanceOptions, name: str) -> tuple[list[Tensor], list[float]]:
    """Loads [L, E] and losses of each of `o.curve_steps` steps."""
    lesson, model = BalanceLesson(), make_model(o, rt.device)
    version = lesson.make_version(name, model, rt, o)
    step = training_step(version, Batches(o, rt.world, rt.device), rt.world)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for t in range(o.curve_steps):
        optimizer.zero_grad()
        losses.append(step(t).item())
        optimizer.step()
    return lesson.balance.loads, losses


def show(rt: Runtime, o: BalanceOptions) -> None:
    """Train with each version: how uneven the load was at first, half-way and at last; --plot draws it."""
    points = [0, o.curve_steps // 2, o.curve_steps - 1]
    title = f"{o.model}, {o.curve_steps} steps: most loaded expert / mean, averaged over layers"
    table = Table("version", title=title, title_justify="left")
    for column in (*(f"step {t}" for t in points), "experts without a token", "loss, mean of the last 10"):
        table.add_column(column, justify="right")
    histories = {name: train(rt, o, name) for name in o.versions}
    for name, (loads, losses) in histories.items():
        idle, last = int((loads[-1] == 0).sum()), losses[-10:]
        uneven = (f"{imbalance(loads[t]):.2f}" for t in points)
        table.add_row(name, *uneven, str(idle), f"{sum(last) / len(last):.4f}")
    console(rt).print(table)
    if o.plot and rt.rank == 0:
        with figure(o.plot, columns=len(histories), width=2.4 * len(histories), height=4.2) as axes:
            for ax, (name, (loads, _)) in zip(axes, histories.items(), strict=True):
                rows = {str(t): loads_LE[-1].tolist() for t, loads_LE in enumerate(loads)}
                load_map(ax, rows, title=name, most=max(sum(row) for row in rows.values()) / 2)
                ax.set_yticks(range(0, len(rows), max(1, len(rows) // 6)))


def main(rt: Runtime, o: BalanceOptions) -> bool:
    """Prove each version, then show what it does to the load."""
    check(rt, VERSIONS, o)
    check_split(o.model_config().experts, rt.world_size)
    check_micro_batches(rt, o)
    lesson = BalanceLesson()
    formulas = lesson.make_version, lesson.run_bytes, lesson.step_bytes
    right = prove(rt, replace(o, plot=None), *formulas, (), one_device=one_device, axis="ep")
    if o.curve_steps:
        show(rt, o)
    return right


if __name__ == "__main__":
    run(main, BalanceOptions)
