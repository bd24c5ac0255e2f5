"""Pictures of chapter 01: buckets on two time lines, and what each stage of ZeRO keeps."""

from __future__ import annotations

from pathlib import Path

from canvas import BY_RANK, box, canvas, faint, heading, words
from matplotlib.axes import Axes

from common.utils.visualizer import FAINT, INK

LAYERS = 6
LATENCY, TRAVEL = 0.22, 0.55  # of a message, and of a layer's gradients, in units of a layer's backward pass


def lane(axes: Axes, y: float, sizes: list[int]) -> None:
    """Draw a backward pass and, under it, messages that carry the gradients of `sizes` layers each."""
    left, unit, free, done = 3.4, 2.3, 0.0, 0
    for layer in range(LAYERS):
        box(axes, left + unit * layer, y, unit - 0.1, 0.9, f"layer {LAYERS - 1 - layer}", BY_RANK[0])
    for number, size in enumerate(sizes):
        done += size
        start = max(free, float(LAYERS if len(sizes) == LAYERS else done))
        free = start + LATENCY + TRAVEL * size
        text = f"bucket {number}" if size > 1 else f"{LAYERS - 1 - number}"
        box(axes, left + unit * start, y + 1.2, unit * (free - start) - 0.1, 0.9, text, BY_RANK[1])
    words(axes, left - 0.3, y + 0.45, "backward pass", ha="right")
    words(axes, left - 0.3, y + 1.65, "all-reduce", ha="right")
    end = left + unit * LAYERS - 0.05
    axes.plot([end, end], [y - 0.3, y + 2.4], color=FAINT, linestyle=":", linewidth=1.3)
    axes.annotate(
        "",
        xy=(left + unit * free, y + 2.45),
        xytext=(end, y + 2.45),
        arrowprops={"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0},
    )
    words(axes, (end + left + unit * free) / 2, y + 2.85, "exposed", ha="center")


def bucket_overlap(path: Path) -> None:
    """Draw the naive version, which sends when the backward pass has ended, above three buckets."""
    with canvas(path, 28.5, 8.6) as axes:
        heading(axes, 0.2, 0.4, "naive: one message per layer, after the backward pass")
        lane(axes, 1.0, [1] * LAYERS)
        heading(axes, 0.2, 4.9, "bucketed: a message as soon as the gradients of two layers are complete")
        lane(axes, 5.5, [2] * (LAYERS // 2))
        faint(axes, 28.3, 8.35, "time →", ha="right")


def kept(stage: int, ranks: int) -> dict[str, float]:
    """Return the bytes per parameter that a rank keeps in float32 with AdamW."""
    return {
        "weights": 4 / (ranks if stage >= 3 else 1),
        "gradients": 4 / (ranks if stage >= 2 else 1),
        "AdamW's state": 8 / (ranks if stage >= 1 else 1),
    }


def zero_memory(path: Path, ranks: int = 8) -> None:
    """Draw the bytes per parameter of each stage as a bar."""
    with canvas(path, 26, 7.2) as axes:
        unit = 1.05
        for stage in range(4):
            y, x = 1.3 + 1.4 * stage, 5.0
            words(axes, 4.7, y + 0.5, "data parallelism" if stage == 0 else f"ZeRO-{stage}", ha="right")
            parts = kept(stage, ranks)
            for (name, size), fill in zip(parts.items(), BY_RANK, strict=False):
                label = f"{size:g}" if size >= 1 else ""
                box(axes, x, y, unit * size - 0.04, 1.0, label, fill)
                if stage == 0:
                    words(axes, x + unit * size / 2, 0.7, name, ha="center")
                x += unit * size
            terms = " + ".join(f"{size:g}" for size in parts.values())
            words(axes, x + 0.3, y + 0.5, f"{terms} = {sum(parts.values()):g}")
        faint(axes, 5.0, 6.95, f"bytes per parameter on each of {ranks} ranks, float32, without activations")


PICTURES = {"bucket-overlap": bucket_overlap, "zero-memory": zero_memory}
