"""Rules of `check`: functions that take a host's facts and yield lines, in the order in which they are added.

    @rule("topology", gpus=2)
    def topology(host): yield ...        # a skipped line of that name on a host with fewer GPUs

`gpu_rules` and `host_rules` have them. Causes come before their consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from common.machine.facts import Gpu, Host
from common.machine.verdict import NO_GPU, Line, passed, skipped

Rule = Callable[[Host], Iterator[Line]]
RULES: list[Rule] = []


def rule(name: str = "", gpus: int = 0) -> Callable[[Rule], Rule]:
    """Add a rule to the check; on a host with fewer GPUs that answer, it is a skipped line of that name."""

    def add(function: Rule) -> Rule:
        def lines(host: Host) -> Iterator[Line]:
            there = len(each_gpu(host))
            if there < gpus:
                yield skipped(name, "one GPU has no partner" if there else NO_GPU)
            else:
                yield from function(host)

        RULES.append(lines)
        return function

    return add


def each_gpu(host: Host) -> list[Gpu]:
    """Return the GPUs that answer."""
    return [gpu for gpu in host.gpus if not gpu.lost]


def all_alike(name: str, bad: list[str], good: str, cure: str, otherwise: str = "fail") -> Line:
    """Return one line for all GPUs: those that are wrong by name, or what all have in common."""
    if bad:
        return Line(name, "warn" if otherwise == "warn" else "fail", "; ".join(bad), cure)
    return passed(name, good)
