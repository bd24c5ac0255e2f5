"""What calls refuse. Apart from launch.py, which imports torch: many workers need none."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def said_by(calls: Iterable[Callable[[], object]]) -> list[str]:
    """The error that each call raises, with its type; empty where it raises none."""
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except (ValueError, RuntimeError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
