"""Errors that calls raise. Separate from launch.py, which imports torch: many workers need no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def said_by(calls: Iterable[Callable[[], object]]) -> list[str]:
    """Return the error that each call raises, with its type; empty if it raises none."""
    said = []
    for call in calls:
        try:
            call()
            said.append("")
        except (ValueError, RuntimeError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
