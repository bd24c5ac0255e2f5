"""Pictures of chapter 03: a Transformer block with the operators f and g; compute and messages of 1 to 32 ranks."""

from __future__ import annotations

from pathlib import Path

from canvas import BY_RANK, PALE, RED, arrow, box, canvas, faint, heading, words
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


def seconds(ranks: int) -> tuple[float, float]:
    """Return the seconds of compute and of messages per sequence of Llama 3 70B, by the formulas of chapter 03."""
    compute = 6 * 70.6e9 * 8192 / ranks / 4e14
    sent = 80 * 4 * 2 * (ranks - 1) / ranks * 2 * 8192 * 8192
    return compute, sent / (450e9 if ranks <= 8 else 50e9)


def tensor_communication(path: Path) -> None:
    """Draw the seconds of 1 to 32 ranks as bars, compute before messages."""
    left, unit = 7.4, 2.1
    with canvas(path, 28.5, 9.4) as axes:
        for x, fill, text in ((left, BY_RANK[0], "compute"), (left + 4, RED, "messages")):
            box(axes, x, 0.3, 0.8, 0.7, "", fill)
            words(axes, x + 1.1, 0.65, text)
        for i, ranks in enumerate((1, 2, 4, 8, 16, 32)):
            y, x = 1.7 + 1.2 * i, left
            hosts = "1 host" if ranks <= 8 else f"{ranks // 8} hosts"
            words(axes, left - 0.3, y + 0.45, f"{ranks} GPU{'s' * (ranks > 1)}, {hosts}", ha="right")
            for time, fill in zip(seconds(ranks), (BY_RANK[0], RED), strict=True):
                text = f"{time:.2f}" if unit * time > 1 else ""
                if time:
                    box(axes, x, y, unit * time - 0.03, 0.9, text, fill, fontsize=8)
                x += unit * time
            words(axes, x + 0.3, y + 0.45, f"{sum(seconds(ranks)):.2f} s", fontweight="bold")
        faint(axes, 28.2, 0.65, "seconds per sequence", ha="right")


PICTURES = {"transformer-f-g": transformer_f_g, "tensor-communication": tensor_communication}
