"""Helpers of the museums of silent bugs: find and print an exhibit's differences from one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import KINDS, Difference

UNSEEN = 0.1  # relative change of the loss that a curve over few noisy batches hides; exhibits reach 0.026

Found = dict[str, dict[str, Difference]]  # optimizer, kind


def show(name: str, found: Mapping[str, Mapping[str, Difference]], more: str = "") -> None:
    """Print one line per optimizer, ending with `more`."""
    for optimizer, differences in found.items():
        values = "  ".join(f"{kind} {d.value:.1e}" for kind, d in differences.items())
        print(f"\n{name}, {optimizer}: {values}{more}", end="")


def worst_of(ranks: list[Found]) -> Found:
    """Return the largest difference over all ranks, for each optimizer and kind."""
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
    """Run `visit(rt, name)` for all exhibits on ranks started once; return the largest differences."""
    ranks = spawn(_visit_each, world, visit, list(names), timeout=120, limit=240)
    return {name: worst_of([found[name] for found in ranks]) for name in ranks[0]}


def is_right(name: str, worst: Found) -> bool:
    """Print an exhibit; return True if its name begins with "right".

    Assert that such an exhibit equals one device to 1e-12.
    """
    show(name, worst)
    right = name.startswith("right")
    if right:
        assert max(d.value for found in worst.values() for d in found.values()) <= 1e-12
    return right
