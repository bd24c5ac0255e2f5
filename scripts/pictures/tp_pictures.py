"""Picture of chapter 03: a Transformer block on two tensor-parallel ranks, with the operators f and g."""

from __future__ import annotations

from pathlib import Path

from canvas import BY_RANK, PALE, arrow, box, canvas, faint, heading, words
from matplotlib.axes import Axes

from common.utils.visualizer import INK

F_FILL, G_FILL = "#f3cd85", "#8ed1b8"


def half(axes: Axes, x: float, norm: str, first: str, middle: str, second: str) -> float:
    """Draw norm, f, the split products of both ranks, g and the residual sum; return the right end."""
    axes.plot([x, x, x + 14.6, x + 14.6], [3.5, 0.9, 0.9, 3.05], color=INK, linewidth=1.3)
    words(axes, x + 7.3, 0.5, "residual", ha="center", fontsize=8)
    box(axes, x + 0.5, 3.05, 1.9, 0.9, norm)
    box(axes, x + 2.9, 2.95, 1.1, 1.1, "f", F_FILL, fontweight="bold", fontsize=12)
    box(axes, x + 12.4, 2.95, 1.1, 1.1, "g", G_FILL, fontweight="bold", fontsize=12)
    arrow(axes, (x, 3.5), (x + 0.5, 3.5))
    arrow(axes, (x + 2.4, 3.5), (x + 2.9, 3.5))
    for rank, y in enumerate((1.5, 4.4)):
        arrow(axes, (x + 4.0, 3.5), (x + 4.8, y + 0.6))
        for i, text in enumerate((first, middle, second)):
            box(axes, x + 4.8 + 2.4 * i, y, 2.1, 1.2, text.format(rank=rank), BY_RANK[rank * 3], fontsize=8)
            if i:
                arrow(axes, (x + 4.5 + 2.4 * i, y + 0.6), (x + 4.8 + 2.4 * i, y + 0.6))
        arrow(axes, (x + 11.7, y + 0.6), (x + 12.4, 3.5))
        faint(axes, x + 4.8, y - 0.25 if rank == 0 else y + 1.45, f"rank {rank}", fontsize=8)
    arrow(axes, (x + 13.5, 3.5), (x + 14.2, 3.5))
    box(axes, x + 14.2, 3.1, 0.8, 0.8, "+", PALE, fontweight="bold")
    return x + 15.0


def transformer_f_g(path: Path) -> None:
    """Draw both halves of the block, each between f and g."""
    with canvas(path, 31.8, 9.0) as axes:
        x = half(
            axes, 0.6, "norm", "Wq Wk Wv,\ncolumns {rank}", "attention,\nheads {rank}", "Wo,\nrows {rank}"
        )
        axes.plot([x, x + 0.3], [3.5, 3.5], color=INK, linewidth=1.3)
        x = half(axes, x + 0.3, "norm", "W up,\ncolumns {rank}", "GELU", "W down,\nrows {rank}")
        arrow(axes, (x, 3.5), (x + 0.8, 3.5))
        heading(axes, 7.9, 6.5, "attention", ha="center")
        heading(axes, 23.2, 6.5, "MLP", ha="center")
        box(axes, 0.6, 7.4, 1.1, 1.1, "f", F_FILL, fontweight="bold", fontsize=12)
        words(axes, 2.0, 7.95, "forward: copy, no message\nbackward: all-reduce of the gradient")
        box(axes, 12.6, 7.4, 1.1, 1.1, "g", G_FILL, fontweight="bold", fontsize=12)
        words(axes, 14.0, 7.95, "forward: all-reduce of the two ranks' terms\nbackward: copy, no message")


PICTURES = {"transformer-f-g": transformer_f_g}
