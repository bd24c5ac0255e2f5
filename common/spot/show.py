"""Print the symptoms of a bug, its page with line numbers, and its explanation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

from common.launch.terminal import make_table
from common.lesson.equality import KINDS
from common.spot.bugs import ROOT, SYMPTOMS, Bug
from common.spot.run import Symptoms, load
from common.utils.visualizer import figure, loss_curves

BARS = "▁▂▃▄▅▆▇█"
COLUMNS, WIDE = 100, 120  # of text; of a terminal that shows all steps


def curve(values: Sequence[float], least: float, most: float) -> str:
    """Return a row of bars, one per value, between two bounds."""
    unit = (most - least) / (len(BARS) - 1)
    unit = unit if unit > 1e-9 * abs(most) else 1.0 + abs(most)
    return "".join(BARS[round((min(max(v, least), most) - least) / unit)] if v == v else "?" for v in values)


def show_symptoms(out: Console, bug: Bug, found: dict[str, Symptoms] | str) -> None:
    """Print the title, then what was measured."""
    ranks = " ".join(f"{axis}={n}" for axis, n in load(bug.page, bug.path).MESH.items())
    out.print(f"{bug.place}: {bug.path.relative_to(ROOT)}, {ranks}, with one wrong line", style="bold")
    if isinstance(found, str):
        out.print("The page does not come to its end:")
        out.print(escape(textwrap.indent(found.replace(f"{ROOT}/", ""), "  ")))
        return
    out.print(curves(found, out.width))
    differences = make_table(
        "Largest relative difference from one device",
        ("", *(head for name in found for head in (f">{name}", "where"))),
        ((kind, *(text for s in found.values() for text in _difference(s, kind))) for kind in KINDS),
    )
    out.print(differences)
    sgd = found["sgd"]
    steps = (0, 1, len(sgd.by_name) - 1)
    out.print(
        make_table(
            "Relative difference by name, sgd",
            ("parameter", *(f">gradient, step {t}" for t in steps), ">weight at the end"),
            (
                (name, *(_number(sgd.by_name[t].get(name)) for t in steps), _number(sgd.weights.get(name)))
                for name in sorted({name for t in steps for name in sgd.by_name[t]} | set(sgd.weights))
            ),
        )
    )


def curves(found: dict[str, Symptoms], width: int) -> Table:
    """Return the table of losses and gradient norms, one device beside the page; fewer steps where it is narrow."""
    rows, last = [], len(found["sgd"].by_name) - 1
    steps = range(last + 1) if width >= WIDE else (0, 1, last)
    for optimizer, symptoms in found.items():
        for name, (one, page) in (("loss", symptoms.losses), ("gradient norm", symptoms.norms)):
            least, most = min(one), max(one)
            for who, values in ((f"{name}, one device", one), (f"{name}, this page", page)):
                numbers = [f"{values[t]:.4g}" for t in steps]
                rows.append((optimizer, who, curve(values, least, most), *numbers))
    return make_table("Steps", ("", "", "", *(f">{t}" for t in steps)), rows)


def _difference(symptoms: Symptoms, kind: str) -> tuple[str, str]:
    d = symptoms.differences[kind]
    return _number(d.value), d.where if d.value > 1e-12 else ""


def _number(value: float | None) -> str:
    return "" if value is None else "equal" if value <= 1e-12 else f"{value:.1e}"


def show_page(out: Console, bug: Bug) -> None:
    """Print the page with its bug, with line numbers."""
    if out.is_terminal:
        out.print(Syntax(bug.text.rstrip(), "python", line_numbers=True, background_color="default"))
        return
    for number, line in enumerate(bug.text.splitlines(), 1):
        out.print(escape(f"{number:4}  {line}").rstrip())


def show_solution(out: Console, bug: Bug) -> None:
    """Print the wrong line and the right one, the explanation and the source."""
    for sign, text in (("-", bug.wrong), ("+", bug.right)):
        for number, line in enumerate(text.splitlines(), bug.first):
            out.print(escape(f"{number if sign == '-' else '':4} {sign} {line}"))
    name = f"{bug.name[0].upper()}{bug.name[1:]}"
    said = textwrap.fill(f"{name}. {bug.explanation}", min(COLUMNS, out.width))
    out.print(f"\n{escape(said)}")
    out.print(f"Source: {escape(bug.source)}")


def show_list(out: Console, bugs: Sequence[Bug]) -> None:
    """Print the bugs without what would give them away."""
    rows = [(bug.place, bug.path.parents[1].name[3:], bug.path.name, SYMPTOMS[bug.symptom]) for bug in bugs]
    out.print(make_table(f"{len(bugs)} bugs to find", ("bug", "chapter", "page", "symptom"), rows))


def plot(path: Path, bug: Bug, found: dict[str, Symptoms]) -> None:
    """Draw the losses of one device and of the page, an axis for each optimizer."""
    with figure(path, columns=len(found), width=8.0) as every:
        for axes, (optimizer, symptoms) in zip(every, found.items(), strict=True):
            one, page = symptoms.losses
            loss_curves(axes, {"one device": one, f"bug {bug.place}": page}, title=optimizer)
