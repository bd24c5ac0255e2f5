"""Predicted and, on request, measured cost of each way to split an operation.

print(explain(matmul, a, b))
found = explain(matmul, a, b, measure=5)       # runs each way that fits, five times
found.chosen, found.regret
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from common.comm.ledger import show_bytes
from common.errors import UsageError
from common.launch.terminal import WIDE, make_table
from common.lesson.measure import in_turn
from common.tensors.cost import Way, asked_of, choose, first_operand
from common.tensors.rates import ARITHMETIC
from common.tensors.tensor import DistributedTensor, describe


@dataclass(frozen=True)
class Candidate:
    """A way with its predicted seconds and, if it was run, the median of its measured ones.

    arithmetic, moves: predicted seconds of products and transforms, and of copies and messages. `moves` includes the
    messages that travel during the arithmetic, which `predicted` counts only in part.
    """

    way: Way
    arithmetic: float
    moves: float
    predicted: float
    measured: float | None = None


@dataclass(frozen=True)
class Explanation:
    """All ways of an operation, the cheapest by prediction first. Prints as a table."""

    operation: str
    candidates: Sequence[Candidate]
    chosen: str

    @property
    def regret(self) -> float:
        """Measured seconds of the chosen way beyond those of the fastest one, as a share.

        Raises UsageError if the chosen way was not measured.
        """
        times = {c.way.name: c.measured for c in self.candidates if c.measured is not None}
        if self.chosen not in times:
            raise UsageError(f"regret: {self.chosen!r} was not measured; call explain(..., measure=5)")
        return times[self.chosen] / min(times.values()) - 1

    def __str__(self) -> str:
        rows = [
            (
                c.way.name + (" *" if c.way.name == self.chosen else ""),
                f"{c.arithmetic * 1e3:.3f}",
                f"{c.moves * 1e3:.3f}",
                f"{c.predicted * 1e3:.3f}",
                "" if c.measured is None else f"{c.measured * 1e3:.3f}",
                show_bytes(c.way.cost.sent),
                show_bytes(c.way.cost.memory),
            )
            for c in self.candidates
        ]
        heads = (
            "way (* chosen)",
            ">arithmetic ms",
            ">moves ms",
            ">predicted ms",
            ">measured ms",
            ">bytes sent",
            ">extra bytes",
        )
        out = Console(width=WIDE, force_terminal=False, highlight=False)
        with out.capture() as text:
            out.print(make_table(self.operation, heads, rows))
        return text.get()


def explain(
    operation: Callable[..., DistributedTensor], *args: Any, measure: int = 0, **kwargs: Any
) -> Explanation:
    """Return what each way to split `operation(*args, **kwargs)` costs on `grid.rates`.

    Of an einsum of several tensors: of the first pair of its path.

    measure: how often to run each way that fits into memory, in turn; 0 runs none. The runs record no gradients, but
    the ways are those of the call, which are fewer where an operand needs one.

    All ranks call it, with the same arguments. Raises UsageError as the operation does, for a `way` that does not
    exist, and for a negative `measure`.
    """
    if measure < 0:
        raise UsageError(f"explain: measure={measure}: give how often to run each way, 0 for not at all")
    first = first_operand(operation, *args, **kwargs)
    name, grid = operation.__name__, first.grid
    given = describe(*(x for x in (*args, *kwargs.values()) if not callable(x)))
    times: dict[str, float] = {}
    with grid.operation(f"explain({name}, {given}, measure={measure})"):
        ways, way = asked_of(operation, *args, **kwargs)
        rates, best = grid.rates, choose(grid, name, ways, way)
        grid.meet()
        if measure:
            fits = [w for w in ways if w.cost.memory <= rates.memory]
            cases: dict[str, Callable[[], object]] = {w.name: w.run for w in fits}
            with torch.no_grad():
                found = in_turn(cases, measure, grid.world, device=first.device.type)
            times = {n: m.median for n, m in found.items()}
    candidates = [
        Candidate(
            w,
            sum(rates.seconds(t) for t in w.cost.terms if t.kind in ARITHMETIC),
            sum(rates.seconds(t) for t in w.cost.terms if t.kind not in ARITHMETIC),
            rates.predict(w.cost.terms),
            times.get(w.name),
        )
        for w in ways
    ]
    if name == "einsum" and len(args) > 3:
        name += ", first pair"
    return Explanation(name, sorted(candidates, key=lambda c: c.predicted), best.name)
