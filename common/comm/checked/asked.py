"""--check of a lesson: whatever harness runs its strategy opens the block, if the user asked for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.comm.checked.block import Checker, checked
from common.comm.group import Group
from common.comm.mesh import Mesh

timeout: float | None = None
"""Seconds that a rank waits for the others before a collective; None: --check was not given."""
blocks: list[Checker] = []
"""Checkers of this run."""


@contextmanager
def asking(seconds: float) -> Iterator[list[Checker]]:
    """Let `if_asked` check inside this block; yield the list of the checkers to come."""
    global timeout
    blocks.clear()
    timeout = seconds
    try:
        yield blocks
    finally:
        timeout = None


@contextmanager
def if_asked(over: Mesh | Group | None) -> Iterator[None]:
    """Check the block if --check was given and there is more than one rank; None: there is nothing to check."""
    world = over.world if isinstance(over, Mesh) else over
    if timeout is None or over is None or world is None or world.size == 1:
        yield
        return
    with checked(over, timeout) as checker:
        blocks.append(checker)
        yield
