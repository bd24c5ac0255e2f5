"""What the museums of silent bugs print: an exhibit's differences to one device, for each optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from common.equality import KINDS, Difference
from common.runtime import Runtime
from common.spawn import spawn

UNSEEN = 0.1  # of the loss: a curve over few noisy batches does not show it. The exhibits reach 0.026

Found = dict[str, dict[str, Difference]]  # optimizer, kind


def show(name: str, found: Mapping[str, Mapping[str, Difference]], more: str = "") -> None:
    """One line an optimizer; `more` ends it."""
    for optimizer, differences in found.items():
        values = "  ".join(f"{kind} {d.value:.1e}" for kind, d in differences.items())
        print(f"\n{name}, {optimizer}: {values}{more}", end="")


def worst_of(ranks: list[Found]) -> Found:
    """The largest of all ranks."""
    return {
        optimizer: {
            kind: max((found[optimizer][kind] for found in ranks), key=lambda d: d.value) for kind in KINDS
        }
        for optimizer in ranks[0]
    }


def _visit_each(rt: Runtime, visit: Callable[[Runtime, str], Found], names: list[str]) -> dict[str, Found]:
    return {name: visit(rt, name) for name in names}


def visit_all(
    visit: Callable[[Runtime, str], Found], names: Iterable[str], world: int = 2
) -> dict[str, Found]:
    """What `visit(rt, name)` finds of each exhibit, the largest of all ranks, which start once for all."""
    ranks = spawn(_visit_each, world, visit, list(names), timeout=120, limit=240)
    return {name: worst_of([found[name] for found in ranks]) for name in ranks[0]}


def is_right(name: str, worst: Found) -> bool:
    """Prints an exhibit; whether it is one of those called right, which are equal to one device."""
    show(name, worst)
    right = name.startswith("right")
    if right:
        assert max(d.value for found in worst.values() for d in found.values()) <= 1e-12
    return right
