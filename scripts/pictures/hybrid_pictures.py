"""Pictures of chapter 06: the groups of a mesh, and the memory per GPU of a 70B model under each split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from canvas import BY_RANK, RED, arrow, box, canvas, faint, heading, words

SHAPE = {"pp": 2, "dp": 2, "tp": 2}
SPLITS = {"tp": "each matrix", "dp": "the batch", "pp": "the layers"}


def mesh_groups(path: Path) -> None:
    """Draw eight ranks three times, in the colours of the groups along tp, dp and pp."""
    places = list(np.ndindex(*SHAPE.values()))
    with canvas(path, 29.4, 11.4) as axes:
        for panel, axis in enumerate(SPLITS):
            left, along = 1.5 + 9.6 * panel, list(SHAPE).index(axis)
            heading(axes, left, 0.4, f"groups along {axis}")
            words(axes, left, 1.2, f"share {SPLITS[axis]}")
            groups: list[tuple[int, ...]] = []
            for rank, place in enumerate(places):
                of = place[:along] + place[along + 1 :]
                if of not in groups:
                    groups.append(of)
                p, d, t = place
                x, y = left + 3.9 * t, 2.0 + 4.7 * p + 2.0 * d
                box(
                    axes,
                    x,
                    y,
                    3.5,
                    1.6,
                    f"rank {rank}\npp {p}  dp {d}  tp {t}",
                    BY_RANK[groups.index(of)],
                    fontsize=8,
                )
            if panel == 0:
                for p in range(SHAPE["pp"]):
                    words(axes, 0.7, 3.8 + 4.7 * p, f"stage {p}", rotation=90, ha="center")
            arrow(axes, (left + 3.7, 5.75), (left + 3.7, 6.6), linewidth=1.3)
        faint(
            axes,
            1.5,
            11.1,
            "Boxes of one colour form a group. Activations go from stage 0 to stage 1, gradients back.",
        )


PARAMETERS, LAYERS, WIDTH, TOKENS, ROOM = 70.6e9, 80, 8192, 8192, 80
MESHES = {  # name: (tp, pp, dp, stage of ZeRO, checkpointing), the first four as in the table of chapter 01
    "dp 64": (1, 1, 64, 0, True),
    "dp 64, ZeRO-1": (1, 1, 64, 1, True),
    "dp 64, ZeRO-2": (1, 1, 64, 2, True),
    "dp 64, ZeRO-3": (1, 1, 64, 3, True),
    "pp 8 × dp 8, ZeRO-1": (1, 8, 8, 1, False),
    "the same, checkpointing": (1, 8, 8, 1, True),
    "tp 8 × dp 8, ZeRO-1": (8, 1, 8, 1, False),
    "tp 4 × pp 8 × dp 2, ZeRO-1": (4, 8, 2, 1, False),
}


def gigabytes(tp: int, pp: int, dp: int, stage: int, again: bool) -> dict[str, float]:
    """Return the GB per GPU of a 70B model; one sequence per micro-batch, 1F1B, 2 + 2 + 12 bytes per parameter."""
    owned = PARAMETERS / (tp * pp)
    return {
        "weights": 2 * owned / (dp if stage >= 3 else 1) / 1e9,
        "gradients": 2 * owned / (dp if stage >= 2 else 1) / 1e9,
        "AdamW's state": 12 * owned / (dp if stage >= 1 else 1) / 1e9,
        "activations": (2 if again else 34) * TOKENS * WIDTH * LAYERS / tp / 1e9,
    }


def memory_by_strategy(path: Path) -> None:
    """Draw the GB of each mesh as a bar, and the memory of the GPU as a line."""
    longest, unit, left = 320.0, 0.062, 9.4
    with canvas(path, 33, 12.2) as axes:
        x = left
        for name, fill in zip(gigabytes(1, 1, 1, 0, True), BY_RANK, strict=True):
            box(axes, x, 0.3, 0.8, 0.7, "", fill)
            words(axes, x + 1.1, 0.65, name)
            x += 2.2 + 0.37 * len(name)
        for line, (name, mesh) in enumerate(MESHES.items()):
            y, x, parts = 1.7 + 1.2 * line, left, gigabytes(*mesh)
            words(axes, left - 0.3, y + 0.45, name, ha="right")
            for size, fill in zip(parts.values(), BY_RANK, strict=True):
                shown = min(unit * size, left + unit * longest - x)
                box(
                    axes,
                    x,
                    y,
                    max(shown - 0.03, 0.02),
                    0.9,
                    f"{size:.0f}" if shown > 1.0 else "",
                    fill,
                    fontsize=8,
                )
                x += shown
            total = sum(parts.values())
            cut = total > longest
            near = abs(total - ROOM) < 20  # keep the number off the line
            at = left + unit * ROOM if near else x
            words(axes, at + 0.3, y + 0.45, f"… {total:.0f}" if cut else f"{total:.0f}", fontweight="bold")
        end = 1.5 + 1.2 * len(MESHES)
        axes.plot([left + unit * ROOM] * 2, [1.4, end], color=RED, linewidth=1.6, linestyle="--")
        words(axes, left + unit * ROOM, end + 0.35, f"{ROOM} GB of an H100", ha="center", color=RED)
        faint(axes, 32.8, end + 0.35, "GB per GPU; the first four rows with checkpointing", ha="right")


PICTURES = {"mesh-groups": mesh_groups, "memory-by-strategy": memory_by_strategy}
