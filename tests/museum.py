"""Helpers of the museums of silent bugs: compare every exhibit with one device and print the differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import KINDS, OPTIMIZERS, Difference

UNSEEN = 0.1  # relative change of the loss that a curve over few noisy batches hides; exhibits reach 0.026

Found = dict[str, dict[str, Difference]]  # optimizer, kind
Visit = Callable[[Runtime, str, str], dict[str, Difference]]


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
        for optimizer in OPTIMIZERS
    }


def _visit_each(rt: Runtime, visit: Visit, names: list[str]) -> dict[str, Found]:
    return {name: {optimizer: visit(rt, name, optimizer) for optimizer in OPTIMIZERS} for name in names}


def tour(
    visit: Visit,
    exhibits: Mapping[str, Any],
    caught: Callable[[str, Found], None],
    ranks: Callable[[str], int] = lambda name: 2,
) -> tuple[Any, Any]:
    """Return a fixture that visits all exhibits, and a test of each: `visited, test_exhibit = tour(...)`.

    `visit(rt, name, optimizer)` returns an exhibit's differences from one device on this rank; it runs on
    `ranks(name)` ranks, started once for all exhibits. An exhibit whose name begins with "right" equals one
    device to 1e-12; of any other `caught(name, found)` asserts what shows it. Both hold on every rank.
    """

    @pytest.fixture(scope="module")
    def visited() -> dict[str, list[Found]]:
        found: dict[str, list[Found]] = {}
        for world in sorted({ranks(name) for name in exhibits}):
            names = [name for name in exhibits if ranks(name) == world]
            of_ranks = spawn(_visit_each, world, visit, names)
            found |= {name: [of_rank[name] for of_rank in of_ranks] for name in names}
        return found

    @pytest.mark.parametrize("name", list(exhibits))
    def test_exhibit(name: str, visited: dict[str, list[Found]]) -> None:
        show(name, worst_of(visited[name]))
        for found in visited[name]:
            if name.startswith("right"):
                assert max(d.value for kinds in found.values() for d in kinds.values()) <= 1e-12
            else:
                caught(name, found)

    return visited, test_exhibit
