"""Picture of chapter 02: five schedules on one time axis."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from canvas import INSIDE, SCALE, faint, heading, words
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from common.utils.visualizer import FAINT, figure

from pp_checker import held
from pp_schedules import KINDS, make_schedule
from pp_simulator import equal, simulate

RANKS, MICRO_BATCHES = 4, 8
FILL = {
    "F": ("#8fc1e3", "#c9e1f2"),
    "B": ("#f3cd85", "#f9e6c4"),
    "I": ("#f3cd85", "#f9e6c4"),
    "W": ("#8ed1b8", "#c9e9dd"),
}
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-v": "ZB-V",
}


def row_of(axes: Axes, name: str, top: float, end: float) -> None:
    """Draw a schedule in four rows below `top`; a unit is the forward of one micro-batch on one rank."""
    schedule = make_schedule(name, RANKS, MICRO_BATCHES)
    chunks = schedule.stages // RANKS
    line = simulate(schedule, lambda i: equal(i) / chunks)
    heading(axes, 0, top - 0.75, NAMES[name])
    words(axes, end, top - 0.75, f"bubble {float(line.bubble):.1%}".replace("%", " %"), ha="right")
    words(axes, end + 0.6, top - 0.75, "micro-batches held" if name == next(iter(KINDS)) else "held")
    for rank in range(RANKS):
        axes.add_patch(
            Rectangle((0, top + rank), float(line.length), 0.92, facecolor=FAINT, alpha=0.18, linewidth=0)
        )
        most = Fraction(held(schedule, rank), chunks)
        words(axes, -0.4, top + rank + 0.46, f"rank {rank}", ha="right", fontsize=8)
        words(axes, end + 0.6, top + rank + 0.46, f"{float(most):g}")
    for e in line.events:
        second = e.instruction.stage >= RANKS
        start, length = float(e.start), float(e.end - e.start)
        fill = FILL[e.instruction.op][second]
        axes.add_patch(
            Rectangle((start, top + e.rank), length, 0.92, facecolor=fill, edgecolor="white", linewidth=0.5)
        )
        style = {"ha": "center", "fontsize": 7 if length >= 1 else 5.5, "color": INSIDE}
        words(axes, start + length / 2, top + e.rank + 0.48, str(e.instruction.micro), **style)


def pipeline_schedules(path: Path) -> None:
    """Draw all schedules for 4 ranks and 8 micro-batches, with the micro-batches that each rank holds at most."""
    end, gap = 33.0, 5.9
    height = 2.6 + gap * len(KINDS)
    with figure(path, width=42 * SCALE * 0.72, height=height * SCALE * 0.72) as (axes,):
        axes.set(xlim=(-3, end + 6), ylim=(height, 0))
        axes.axis("off")
        x = 0.0
        for text, op, second in (
            ("forward", "F", 0),
            ("backward, or its half for the input", "B", 0),
            ("half for the weights", "W", 0),
            ("paler: second stage of a rank", "F", 1),
        ):
            axes.add_patch(Rectangle((x, 0.15), 0.9, 0.9, facecolor=FILL[op][second], linewidth=0))
            words(axes, x + 1.2, 0.6, text)
            x += 2.4 + 0.24 * len(text)
        for place, name in enumerate(KINDS):
            row_of(axes, name, 2.9 + gap * place, end)
        faint(axes, end, height - 0.3, "time, in forwards of a micro-batch on a rank", ha="right")
        axes.plot([0, end], [height - 1.7] * 2, color=FAINT, linewidth=1)
        for tick in range(0, 34, 3):
            faint(axes, tick, height - 1.2, str(tick), ha="center", fontsize=8)


PICTURES = {"pipeline-schedules": pipeline_schedules}
