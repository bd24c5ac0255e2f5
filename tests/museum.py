"""What the museums of silent bugs print: an exhibit's differences to one device, for each optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from common.equality import KINDS, Difference

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
