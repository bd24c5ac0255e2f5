"""Targets of the choice of a mesh: the formulas on random jobs, and the choice beside a search of all meshes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.comm import Group
from common.grade.targets import Wrong, holds, target

Plan = tuple[int, int, int, int]
NAMES = ("pp", "dp", "tp", "m")


@dataclass(frozen=True)
class Job:
    """A model, its batch and a machine, in the units of the exercise."""

    gpus: int
    host: int
    layers: int
    width: int
    heads: int
    batch: int
    sequence: int
    memory: float
    rate: float
    inside: float
    between: float


def jobs(rng: torch.Generator, number: int) -> Iterator[Job]:
    """Yield random jobs, of 8 to 96 GPUs."""

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=rng))]

    for _ in range(number):
        heads = one_of(24, 32, 40)
        yield Job(
            gpus=one_of(8, 16, 24, 48, 96),
            host=one_of(4, 8),
            layers=one_of(24, 36, 48),
            width=heads * one_of(64, 128),
            heads=heads,
            batch=one_of(48, 96, 192),
            sequence=one_of(2048, 4096),
            memory=one_of(24e9, 40e9, 80e9),
            rate=one_of(1.2e14, 4e14),
            inside=one_of(3e10, 3e11),
            between=one_of(6e9, 2.5e10),
        )


def memory(p: Job, plan: Plan) -> float:
    """Return the bytes of a rank."""
    pp, dp, tp, m = plan
    psi = 12 * p.layers * p.width**2
    activations = min(pp, m) * p.batch / (dp * m) * p.sequence * p.width * 34 / tp * p.layers / pp
    return psi / (pp * tp) * (4 + 12 / dp) + activations


def seconds(p: Job, plan: Plan) -> float:
    """Return the time of a step."""
    pp, dp, tp, m = plan
    psi = 12 * p.layers * p.width**2
    work = 6 * psi * p.batch * p.sequence / (p.gpus * p.rate)
    inside = 8 * p.layers / pp * (tp - 1) / tp * 2 * p.batch / dp * p.sequence * p.width / p.inside
    return (work + inside) * (1 + (pp - 1) / m) + 4 * (dp - 1) / dp * psi / (pp * tp) / p.between


def why_not(p: Job, plan: Plan) -> str:
    """Return the rule that a mesh breaks; empty if it is allowed."""
    pp, dp, tp, m = plan
    if pp * dp * tp != p.gpus:
        return f"pp · dp · tp = {pp * dp * tp}, but there are {p.gpus} GPUs"
    if p.heads % tp or tp > p.host:
        return f"tp={tp} with {p.heads} heads and {p.host} GPUs in a host"
    if p.layers % pp:
        return f"pp={pp} does not divide {p.layers} layers"
    return f"dp · m = {dp * m} does not divide {p.batch} samples" if p.batch % (dp * m) else ""


def all_plans(p: Job) -> list[Plan]:
    """Return every allowed mesh."""
    divisors = [n for n in range(1, p.gpus + 1) if p.gpus % n == 0]
    sizes = [s for s in itertools.product(divisors, repeat=3) if s[0] * s[1] * s[2] == p.gpus]
    plans = [(*s, m) for s in sizes for m in range(1, p.batch + 1) if p.batch % (s[1] * m) == 0]
    return [plan for plan in plans if not why_not(p, plan)]


def shown(plan: Plan) -> str:
    """Return the mesh as `pp=2 dp=4 tp=1 m=8`."""
    return " ".join(f"{name}={n}" for name, n in zip(NAMES, plan, strict=True))


def formula(what: str, mine: Any, right: Any, rng: torch.Generator) -> None:
    """Compare a formula on all allowed meshes of some jobs."""
    for p in jobs(rng, 6):
        for plan in all_plans(p):
            got, want = mine(p, plan), right(p, plan)
            if not abs(got - want) <= 1e-9 * want:
                raise Wrong(f"{what} for {shown(plan)} on {p.gpus} GPUs: {got:.6g}, {want:.6g} is right")


@target("the memory of a rank")
def bytes_of_a_rank(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The formula of the text."""
    formula("memory", mine.memory, memory, rng)


@target("the time of a step")
def time_of_a_step(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The formula of the text."""
    formula("seconds", mine.seconds, seconds, rng)


@target("a mesh that is allowed, fits, and takes at most 1.1 times the best")
def choice(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Compare with a search of all meshes; the targets' own formulas decide."""
    slow_between = Job(16, 4, 24, 8192, 32, 16, 4096, 80e9, 4e14, 3e12, 1e9)  # tp=16 would be fastest
    for p in (*jobs(rng, 20), slow_between):
        fitting = [plan for plan in all_plans(p) if memory(p, plan) <= p.memory]
        got = mine.choose(p)
        if not fitting or got is None:
            holds((got is None) == (not fitting), f"{p}: {got} was chosen; {len(fitting)} meshes fit")
            continue
        holds(not why_not(p, got), f"{shown(got)}: {why_not(p, got)}")
        holds(memory(p, got) <= p.memory, f"{shown(got)} needs {memory(p, got):.3g} of {p.memory:.3g} bytes")
        best = min(fitting, key=lambda plan: seconds(p, plan))
        times = seconds(p, got) / seconds(p, best)
        holds(
            times <= 1.1, f"{shown(got)} takes {times:.2f} times as long as the best mesh for {p.gpus} GPUs"
        )


@target("None where no mesh fits")
def nothing_fits(mine: Any, group: Group, rng: torch.Generator) -> None:
    """A model that is too large for the machine."""
    p = Job(8, 8, 96, 12288, 96, 64, 2048, 40e9, 3e14, 3e11, 2e10)
    got = mine.choose(p)
    holds(got is None, f"{got} was chosen for 175 billion parameters on 8 GPUs of 40 GB: nothing fits")
