"""Pictures of chapter 04: the causal mask by rank in both orders, and the steps of ring attention."""

from __future__ import annotations

from pathlib import Path

from canvas import BY_RANK, PALE, SCALE, arrow, box, canvas, faint, heading, words
from matplotlib.patches import Rectangle

from common.utils.visualizer import figure

from sp_split import Order, chunks

RANKS, TOKENS = 4, 16
RING = 3
ORDERS: tuple[Order, ...] = ("contiguous", "zigzag")


def owners(order: Order) -> list[int]:
    """Return the rank of each token."""
    every = {rank: chunks(order, rank, RANKS) for rank in range(RANKS)}
    length = TOKENS // sum(map(len, every.values()))
    return [next(r for r, mine in every.items() if token // length in mine) for token in range(TOKENS)]


def causal_mask(path: Path) -> None:
    """Draw the pairs of query and key that are computed, in the colour of the rank that has the query."""
    size, cell = (30.0, 15.2), 0.72
    with figure(path, width=size[0] * SCALE * 0.8, height=size[1] * SCALE * 0.8) as (axes,):
        axes.set(xlim=(0, size[0]), ylim=(size[1], 0))
        axes.axis("off")
        for place, order in enumerate(ORDERS):
            left, top = 2.2 + 14.6 * place, 1.5
            of, pairs = owners(order), [0] * RANKS
            heading(axes, left, 0.5, f"{order} order")
            for query in range(TOKENS):
                for key in range(TOKENS):
                    at = (left + cell * key, top + cell * query)
                    fill = BY_RANK[of[query]] if key <= query else PALE
                    alpha = 1 if key <= query else 0.25
                    axes.add_patch(
                        Rectangle(at, cell * 0.92, cell * 0.92, facecolor=fill, alpha=alpha, linewidth=0)
                    )
                pairs[of[query]] += query + 1
                faint(axes, left - 0.25, top + cell * (query + 0.5), str(query), ha="right", fontsize=7)
            for rank, count in enumerate(pairs):
                x = left + 2.9 * rank
                box(axes, x, 13.6, 2.6, 1.3, f"rank {rank}\n{count} pairs", BY_RANK[rank], fontsize=8)
            words(axes, left + cell * TOKENS / 2, 13.25, "keys", ha="center", fontsize=8)
        words(axes, 0.5, 1.5 + cell * TOKENS / 2, "queries", rotation=90, ha="center", fontsize=8)


def ring_attention(path: Path) -> None:
    """Draw for three ranks the keys and values that each has in every step, forward and backward."""
    n, width = RING, 3.7
    with canvas(path, 27.2, 10.4) as axes:
        for turn, title in enumerate(("forward pass", "backward pass")):
            left = 2.4 + 12.9 * turn
            heading(axes, left, 0.4, title)
            for rank in range(n):
                words(axes, left + width * rank + 1.6, 1.2, f"rank {rank}: q{rank}", ha="center")
            for step in range(n):
                y = 1.8 + 2.2 * step
                if turn == 0:
                    words(axes, left - 0.4, y + 0.6, f"step {step}", ha="right")
                for rank in range(n):
                    of = (rank - step) % n
                    added = [(of + k) % n for k in range(1, step + 1)]
                    lines = [f"k{of} v{of}"]
                    if turn and not step:
                        lines.append("own term stays")
                    elif turn:
                        lines.append(f"dk{of} dv{of}: {' + '.join(map(str, added))}")
                    x = left + width * rank
                    box(axes, x, y, 3.2, 1.2, "\n".join(lines), BY_RANK[of], fontsize=8)
                    if step < n - 1 or turn:
                        to = (rank + 1) % n
                        end = (left + width * to + (1.2 if to else 1.9), y + 2.15)
                        wide = rank == n - 1
                        arrow(axes, (x + 1.6, y + 1.2), end, linewidth=0.9, linestyle="--" if wide else "-")
            if turn:
                y = 1.8 + 2.2 * n
                for rank in range(n):
                    terms = " + ".join(str((rank + k) % n) for k in range(1, n))
                    text = f"dk{rank} dv{rank}:\n{terms} + own"
                    box(axes, left + width * rank, y, 3.2, 1.2, text, BY_RANK[rank], fontsize=8)
                words(axes, left - 0.4, y + 0.6, "home", ha="right")
        faint(
            axes, 2.4, 9.9, "An arrow is a message to the next rank; dashed: from the last rank to the first."
        )


PICTURES = {"causal-mask": causal_mask, "ring-attention": ring_attention}
