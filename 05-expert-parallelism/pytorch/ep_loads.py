"""Loads of the experts as tables and pictures: under each router, and over balanced training.

B batch  S sequence  L layers  E experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.equality import TOLERANCE
from common.lesson.job import Job
from common.lesson.runner import DTYPES, console
from common.lesson.training import Batches, make_model
from common.utils.visualizer import figure, load_map

from ep_costs import BalancedBytes
from ep_training import ExpertOptions


def models_table(o: ExpertOptions, trained: Mapping[str, tuple[float, Tensor]]) -> Table:
    """Return a table of the trained models: (loss, router logits) of the last step by name."""
    heads = ("model", ">loss of the last step", ">mean log-sum-exp squared", ">largest logit")
    table = make_table(f"after {o.steps} steps of {o.model}", heads)
    for name, (loss, logits) in trained.items():
        sizes = logits.logsumexp(-1).square().mean(), logits.abs().max()
        table.add_row(name, f"{loss:.4f}", *(f"{x.item():.3f}" for x in sizes))
    return table


def statistics(gates_BSE: Tensor, first_BSE: Tensor) -> Tensor:
    """Return sums, [E + 3]: tokens per expert, tokens without one, choices that are not the first, weights.

    first_BSE: G_BSE of top-1.
    """
    taken_BSE = gates_BSE > 0
    beside = (~taken_BSE.any(-1)).sum(), (taken_BSE & (first_BSE == 0)).sum(), gates_BSE.sum()
    return torch.cat([taken_BSE.sum((0, 1)), torch.stack(beside)]).double()


def load_table(found: Mapping[str, Tensor], tokens: int) -> Table:
    """Return a table of the load under each router."""
    shown = ("fewest", "most", "most / mean", "served", "not first", "left out", "mean weight")
    heads = ("router", *(f">{column}" for column in shown))
    table = make_table(f"{tokens} tokens of real text, routed by the same scores", heads)
    for name, numbers in found.items():
        *taken, alone, second, weight = numbers.tolist()
        most, choices = max(taken), sum(taken)
        loads = (f"{min(taken):g}", f"{most:g}", f"{most * len(taken) / choices:.2f}", f"{choices:g}")
        table.add_row(name, *loads, f"{second:g}", f"{alone / tokens:.1%}", f"{weight / tokens:.2f}")
    return table


def prove_loads(rt: Runtime, o: ExpertOptions, route: Callable[[Batches], dict[str, Tensor]]) -> bool:
    """Show each router's load on a global batch; return True if it is one device's, with bytes by formula.

    route: returns each router's G_BSE for this rank's samples.
    """

    def loads(o: ExpertOptions, group: Group) -> dict[str, Tensor]:
        gates = route(Batches(o, group, rt.device))
        return {name: statistics(gates_BSE, gates["top-1"]) for name, gates_BSE in gates.items()}

    with Ledger() as ledger:
        found = loads(o, rt.world)
        for numbers in found.values():
            comm.all_reduce(numbers, rt.world)
    expected = loads(replace(o, micro_batches=1), Group.alone())
    tokens, E, out = o.batch * o.sequence, o.model_config().experts, console(rt)
    out.print(load_table(found, tokens))
    if o.plot and rt.rank == 0:
        shown = {name: numbers[:E].tolist() for name, numbers in found.items()}
        with figure(o.plot, width=7.4, height=0.9 + 0.36 * len(shown)) as (axes,):
            load_map(axes, shown, title=f"tokens of each expert, of {tokens}")
    equal = all(
        torch.equal(a[:-1], b[:-1]) and torch.isclose(a[-1], b[-1], rtol=TOLERANCE[DTYPES[o.dtype]])
        for a, b in zip(found.values(), expected.values(), strict=True)
    )
    formula = Fraction(2 * (rt.world_size - 1) * len(found) * (E + 3) * 8, rt.world_size)
    said = "proved: loads equal to one device's" if equal else "loads are NOT those of one device"
    agree = "=" if ledger.bytes() == formula else "is NOT"
    out.print(f"{said}; bytes counted {agree} formula ({float(formula):g})")
    return equal and ledger.bytes() == formula


def imbalance(loads_LE: Tensor) -> float:
    """Return the largest load over the mean, averaged over layers: 1 is even, E is all on one expert."""
    return (loads_LE.double().amax(1) / loads_LE.double().mean(1)).mean().item()


Train = Callable[..., Iterator[Tensor]]  # of (a job, BalancedBytes)


def history(
    rt: Runtime, o: ExpertOptions, name: str, train: Train, steps: int
) -> tuple[list[Tensor], list[float]]:
    """Train with a version; return the load [L, E] and the loss of each of the steps."""
    mesh, sent, adamw = Mesh(rt.world, ep=rt.world_size), BalancedBytes(), partial(torch.optim.AdamW, lr=3e-3)
    job = Job(rt, o, name, make_model(o, rt.device), mesh, "ep", adamw, steps)
    losses = [loss.item() for loss in train(job, sent)]
    return sent.loads[name], losses


def show_balance(rt: Runtime, o: ExpertOptions, train: Train, steps: int) -> None:
    """Train with each version; show the imbalance at first, middle and last step; --plot draws it."""
    points = [0, steps // 2, steps - 1]
    title = f"{o.model}, {steps} steps: most loaded expert / mean, averaged over layers"
    steps_shown = (f">step {t}" for t in points)
    heads = ("version", *steps_shown, ">experts without a token", ">loss, mean of the last 10")
    table = make_table(title, heads)
    histories = {name: history(rt, o, name, train, steps) for name in o.versions}
    for name, (loads, losses) in histories.items():
        idle, last = int((loads[-1] == 0).sum()), losses[-10:]
        uneven = (f"{imbalance(loads[t]):.2f}" for t in points)
        table.add_row(name, *uneven, str(idle), f"{sum(last) / len(last):.4f}")
    console(rt).print(table)
    if o.plot and rt.rank == 0:
        with figure(o.plot, columns=len(histories), width=1 + 2.3 * len(histories), height=4.2) as axes:
            for ax, (name, (loads, _)) in zip(axes, histories.items(), strict=True):
                rows = {
                    str(t): (loads_LE[-1] / loads_LE[-1].sum()).tolist() for t, loads_LE in enumerate(loads)
                }
                bar = "share of all choices" if ax is axes[-1] else ""
                load_map(ax, rows, title=name, most=0.5, bar=bar)
                ax.set_yticks(range(0, len(rows), max(1, len(rows) // 8)))
            axes[0].set_ylabel("step")
