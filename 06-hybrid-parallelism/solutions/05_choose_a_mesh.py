"""Choosing a mesh: all that are allowed, those that fit, the fastest of them."""

from typing import Any

Plan = tuple[int, int, int, int]  # pp, dp, tp, m


def memory(p: Any, plan: Plan) -> float:
    """Return the bytes that a rank needs."""
    pp, dp, tp, m = plan
    parameters = 12 * p.layers * p.width**2
    samples = p.batch / (dp * m)
    states = parameters / (pp * tp) * (4 + 12 / dp)
    return states + min(pp, m) * samples * p.sequence * p.width * 34 / tp * p.layers / pp


def seconds(p: Any, plan: Plan) -> float:
    """Return the time of a step in seconds."""
    pp, dp, tp, m = plan
    parameters = 12 * p.layers * p.width**2
    work = 6 * parameters * p.batch * p.sequence / (p.gpus * p.rate)
    along_tp = 4 * p.layers / pp * 2 * (tp - 1) / tp * (2 * p.batch / dp * p.sequence * p.width) / p.inside
    along_dp = 2 * (dp - 1) / dp * (2 * parameters / (pp * tp)) / p.between
    return (work + along_tp) * (1 + (pp - 1) / m) + along_dp


def choose(p: Any) -> Plan | None:
    """Return the fastest mesh that is allowed and fits; None if there is none."""
    plans = []
    for tp in (t for t in range(1, p.host + 1) if p.gpus % t == 0 and p.heads % t == 0):
        for pp in (s for s in range(1, p.layers + 1) if p.gpus // tp % s == 0 and p.layers % s == 0):
            dp = p.gpus // tp // pp
            plans += [(pp, dp, tp, m) for m in range(1, p.batch // dp + 1) if p.batch % (dp * m) == 0]
    fitting = [plan for plan in plans if memory(p, plan) <= p.memory]
    return min(fitting, key=lambda plan: seconds(p, plan), default=None)
