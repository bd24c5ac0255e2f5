"""Pictures of the introduction: the ring all-reduce."""

from __future__ import annotations

from pathlib import Path

from canvas import BY_RANK, PALE, RED, box, canvas, faint, heading, outline, words

RANKS = 4


def ring() -> list[tuple[str, list[list[set[int]]], list[int]]]:
    """Return, after every step, its name, the ranks whose numbers each (rank, piece) sums, and the piece sent next.

    In step s of the reduce-scatter rank r sends piece r - s to rank r + 1, which adds its own; then rank r has
    piece r + 1 complete, and in step s of the all-gather sends piece r + 1 - s.
    """
    n = RANKS
    held = [[{rank} for _ in range(n)] for rank in range(n)]
    steps = [("start", [list(row) for row in held], [rank % n for rank in range(n)])]
    for turn in range(2 * (n - 1)):
        gather, step = divmod(turn, n - 1)
        sent = [(rank + gather - step) % n for rank in range(n)]
        arriving = [held[rank][sent[rank]] for rank in range(n)]
        for rank in range(n):
            to, piece = (rank + 1) % n, sent[rank]
            held[to][piece] = arriving[rank] if gather else held[to][piece] | arriving[rank]
        after, step_after = divmod(turn + 1, n - 1)
        following = [(rank + after - step_after) % n for rank in range(n)] if after < 2 else []
        name = f"{'all-gather' if gather else 'reduce-scatter'}, step {step + 1}"
        steps.append((name, [list(row) for row in held], following))
    return steps


def ring_all_reduce(path: Path) -> None:
    """Draw every step of a ring all-reduce of four integers per rank, as communication_demo.py prints them."""
    steps = ring()
    with canvas(path, 24, 13.2) as axes:
        for i, (name, held, sent) in enumerate(steps):
            column, line = (i, 0) if i < RANKS else (i - RANKS + 1, 1)
            x, y = 0.2 + 6 * column, 0.6 + 6 * line
            heading(axes, x + 1, y, name)
            if i in (0, RANKS):
                faint(axes, x + 0.85, y, "rank", ha="right", fontsize=8)
            for rank, row in enumerate(held):
                faint(axes, x + 0.85, y + 1.1 + rank, str(rank), ha="right")
                for piece, of in enumerate(row):
                    value = sum(10 * (r + 1) + piece for r in of)
                    full = len(of) == RANKS
                    fill = "#8ed1b8" if full else BY_RANK[0] if len(of) > 1 else PALE
                    left, top = x + 1 + 1.1 * piece, y + 0.7 + rank
                    box(axes, left, top, 1.0, 0.8, str(value), fill)
                    if sent and sent[rank] == piece:
                        outline(axes, left, top, 1.0, 0.8, RED)
        for y, fill, text in (
            (7.6, PALE, "own number"),
            (8.5, BY_RANK[0], "sum of some ranks"),
            (9.4, "#8ed1b8", "sum of all ranks"),
        ):
            box(axes, 0.4, y, 1.0, 0.7, "", fill)
            words(axes, 1.6, y + 0.35, text)
        outline(axes, 0.4, 10.3, 1.0, 0.7, RED)
        words(axes, 1.6, 10.75, "sent in the next step\nto the next rank", va="center")


PICTURES = {"ring-all-reduce": ring_all_reduce}
