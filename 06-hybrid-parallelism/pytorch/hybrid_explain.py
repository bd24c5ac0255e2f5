"""Tables that explain a mesh: each rank's place, memory and groups, and the bytes of a step per axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial

from rich.console import Group as Stack
from rich.table import Column, Table

from common import comm
from common.comm.ledger import Row, show_bytes
from common.comm.mesh import AXES, Mesh
from common.comm.placement import TOKEN_AXES, gradient_axes

from hybrid_model import Hybrid

right = partial(Column, justify="right")
WHAT = {
    "pp": "activations on to the next stage, gradients back; the loss",
    "ep": "rows to their experts and back",
    "sp": "keys and values, or heads for tokens",
    "tp": "activations into regions and out of them; the loss's three numbers a token",
}


def title(mesh: Mesh) -> str:
    """`pp=2 dp=2 tp=2`: the axes that have more than one rank."""
    return " ".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1) or "one rank"


def label(name: str, mesh: Mesh) -> str:
    """Return a group's name without the axes of size 1."""
    return "+".join(axis for axis in name.split("+") if mesh.shape.get(axis, 2) > 1)


def axes_table(mesh: Mesh) -> Table:
    """Return a table of the axes: ranks, stride, and the dimension of the work that each axis splits."""
    said = f"the mesh: {mesh.world.size} ranks, {title(mesh)}"
    table = Table("axis", right("ranks"), right("stride"), "splits", title=said, title_justify="left")
    splits = {
        "pp": "layers into stages",
        "dp": "samples",
        "ep": "samples, and experts where there are some",
        "sp": "the tokens of each sample",
        "tp": "heads, matrices and the vocabulary",
    }
    stride = mesh.world.size
    for axis, n in mesh.shape.items():
        stride //= n
        table.add_row(axis, str(n), str(stride), splits[axis] if n > 1 else "-")
    return table


def held(hybrid: Hybrid) -> tuple[int, int, int]:
    """Return the bytes of weights, of gradients and of AdamW's two states that this rank keeps between steps.

    With ZeRO these are shards: always of the states, from stage 2 on of the gradients, in stage 3 of the
    weights.
    """
    whole, pieces = (
        sum(p.numel() * p.element_size() for p in parameters)
        for parameters in (hybrid.model.parameters(), hybrid.parameters())
    )
    stage = hybrid.layout.zero
    return pieces if stage == 3 else whole, pieces if stage >= 2 else whole, 2 * pieces


def ranks_table(hybrid: Hybrid) -> Table:
    """Return a table of each rank's place, layers and bytes held. All ranks call it."""
    mesh, names = hybrid.mesh, [name.split(".") for name, _ in hybrid.model.named_parameters()]
    layers = sorted({int(name[1]) for name in names if name[0] == "layers"})
    said = "places, tp innermost, and bytes per rank; activations add to them"
    bytes_held = map(right, ("weights", "gradients", "AdamW's states"))
    table = Table(*map(right, ("rank", *AXES)), "layers", *bytes_held, title=said, title_justify="left")
    for rank, (numbers, *sizes) in enumerate(comm.everyones((layers, *held(hybrid)), mesh.world)):
        at = map(str, mesh.coordinates(rank).values())
        table.add_row(str(rank), *at, " ".join(map(str, numbers)), *map(show_bytes, sizes))
    return table


def members(mesh: Mesh, axes: Iterable[str]) -> list[list[int]]:
    """List the groups of ranks that differ along `axes` alone."""
    along, groups = set(axes), {}  # type: tuple[set[str], dict[tuple[int, ...], list[int]]]
    for rank in range(mesh.world.size):
        rest = tuple(at for axis, at in mesh.coordinates(rank).items() if axis not in along)
        groups.setdefault(rest, []).append(rank)
    return list(groups.values())


def groups_table(hybrid: Hybrid, clip: bool = False) -> Table:
    """Return a table of rank 0's groups in a step, with the gradient sums that follow from the placements."""
    mesh = hybrid.mesh
    talks: dict[tuple[str, ...], list[str]] = {(axis,): [what] for axis, what in WHAT.items()}
    if not hybrid.exchanges:
        del talks["ep",]
    if hybrid.config.tied:
        talks["pp",] = [WHAT["pp"] + "; the head's gradient, which is the embedding's"]
    loads = "; the load of the experts" if hybrid.balance.o.balances else ""
    talks[TOKEN_AXES] = ["the loss and the number of targets" + loads]
    if clip:
        talks[AXES] = ["the norm of the gradient"]
    summed: dict[tuple[str, ...], list[str]] = {}
    for name, p in hybrid.model.named_parameters():
        summed.setdefault(gradient_axes(p), []).append(name)
    sent = "ZeRO: gradients and weights" if hybrid.layout.zero else "gradients"
    for axes, names in summed.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        talks.setdefault(axes, []).append(f"{sent} of {names[0]}{more}")
    by_label: dict[str, tuple[tuple[str, ...], list[str]]] = {}
    for axes, what in talks.items():
        name = "world" if axes == AXES else "+".join(axes)
        by_label.setdefault(label(name, mesh), (axes, []))[1].extend(what)
    said = "groups that talk in a step, as rank 0 takes part in them"
    table = Table("along", "ranks", "what", title=said, title_justify="left")
    for shown, (axes, what) in by_label.items():
        if shown:
            sets = " ".join("{" + " ".join(map(str, ranks)) + "}" for ranks in members(mesh, axes))
            table.add_row(shown, sets, "; ".join(what))
    return table


def bytes_table(mesh: Mesh, formula: Mapping[str, Fraction], rows: Sequence[Row] | None = None) -> Table:
    """Return the bytes of a step along each axis by formula; given ledger rows also calls and bytes counted.

    Before a step the load of the experts is not known: an even load is assumed.
    """
    known = "formula" if rows is not None or "ep" not in formula else "if balanced"
    when = "before it runs" if rows is None else "formula and ledger"
    title = f"bytes that rank 0 sends in a step, {when}"
    columns = (known, *(() if rows is None else ("counted", "calls", "seconds blocked")))
    table = Table("along", *map(right, columns), title=title, title_justify="left", min_width=len(title))
    by_label: dict[str, Fraction] = {}
    for name, sent in sorted(formula.items()):
        by_label[label(name, mesh)] = by_label.get(label(name, mesh), Fraction(0)) + sent
    for shown, sent in by_label.items():
        cells = [shown, show_bytes(sent)]
        if rows is not None:
            mine = [row for row in rows if label(row.axis, mesh) == shown and row.bytes]
            counted = sum((row.bytes for row in mine), Fraction(0))
            calls = ", ".join(f"{n} {op}" for op, n in sorted(Counter(row.op for row in mine).items()))
            cells += [show_bytes(counted), calls, f"{sum(row.seconds for row in mine):.4f}"]
        table.add_row(*cells)
    return table


def explain(hybrid: Hybrid, clip: bool = False) -> Stack:
    """Return the three tables: axes, ranks and groups. All ranks call it."""
    return Stack(axes_table(hybrid.mesh), ranks_table(hybrid), groups_table(hybrid, clip))
