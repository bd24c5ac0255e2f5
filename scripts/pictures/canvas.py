"""Boxes, arrows and words on a plane with y downwards, in the style of the course's plots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from common.utils.visualizer import COLOURS, FAINT, INK, figure

BLUE, ORANGE, GREEN, PINK, SKY, RED, _ = COLOURS
BY_RANK = ("#8fc1e3", "#f3cd85", "#8ed1b8", "#e3b9d1")  # paler, so that black text can be read on them
PALE = "#d9d9d9"
INSIDE = "black"  # text on a coloured box, in every theme
SCALE = 0.42  # inches per unit


@contextmanager
def canvas(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Yield an empty plane of width x height units, saved to `path` at the end."""
    with figure(path, width=width * SCALE, height=height * SCALE) as (axes,):
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.axis("off")
        yield axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str = "", fill: str = PALE, **more: Any
) -> None:
    """Draw a rounded box whose upper left corner is (x, y), with text in its middle. more: of the text."""
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.12", facecolor=fill, edgecolor="none"
    )
    axes.add_patch(patch)
    style: dict[str, Any] = {"fontsize": 9, "color": INSIDE, "linespacing": 1.3} | more
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **style)


def outline(
    axes: Axes, x: float, y: float, width: float, height: float, colour: str = INK, **more: Any
) -> None:
    """Draw the border of a rounded box alone."""
    style: dict[str, Any] = {"linewidth": 1.5} | more
    shape = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor="none", edgecolor=colour, **style)
    )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str = INK,
    bend: float = 0,
    **more: Any,
) -> None:
    """Draw an arrow from `start` to `end`; bend: 0 for a straight one."""
    style: dict[str, Any] = {
        "arrowstyle": "-|>",
        "color": colour,
        "shrinkA": 0,
        "shrinkB": 0,
        "linewidth": 1.3,
        "connectionstyle": f"arc3,rad={bend}",
    }
    axes.annotate("", xy=end, xytext=start, arrowprops=style | more)


def words(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """Write text whose left end, unless `ha` says otherwise, is at (x, y)."""
    style: dict[str, Any] = {"fontsize": 9, "va": "center", "linespacing": 1.3} | more
    axes.text(x, y, text, **style)


def heading(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """Write text in bold."""
    words(axes, x, y, text, fontweight="bold", **more)


def faint(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """Write text in grey."""
    words(axes, x, y, text, color=FAINT, **more)
