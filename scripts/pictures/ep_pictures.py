"""Picture of chapter 05: tokens of two ranks travel to four experts and back."""

from __future__ import annotations

from pathlib import Path

from canvas import BY_RANK, PALE, arrow, box, canvas, faint, heading, outline, words

from common.utils.visualizer import COLOURS, FAINT

EXPERT_OF = (2, 0, 2, 1, 1, 2, 3, 0)  # the router's choice for each of eight tokens
RANKS, EXPERTS = 2, 4


def expert_routing(path: Path) -> None:
    """Draw the two all-to-alls: dispatch to the experts, combine back to the tokens."""
    per_rank, of_rank = EXPERTS // RANKS, len(EXPERT_OF) // RANKS
    with canvas(path, 28, 13.4) as axes:
        for x, title in (
            (1.2, "tokens"),
            (4.6, "router's choice"),
            (12.7, "experts"),
            (23.3, "outputs"),
        ):
            heading(axes, x + 1.3, 0.5, title, ha="center")
        for x, title in ((9.7, "dispatch"), (19.4, "combine")):
            heading(axes, x, 0.5, title, ha="center")
            faint(axes, x, 1.2, "all-to-all", ha="center", fontsize=8)
        tops = {token: 1.9 + 1.25 * token + 0.7 * (token // of_rank) for token in range(len(EXPERT_OF))}
        for rank in range(RANKS):
            top = tops[rank * of_rank]
            height = 1.25 * of_rank
            outline(axes, 0.9, top - 0.25, 7.3, height + 0.25, FAINT)
            outline(axes, 11.6, top - 0.25, 4.9, height + 0.25, FAINT)
            outline(axes, 22.8, top - 0.25, 3.6, height + 0.25, FAINT)
            words(axes, 0.45, top + height / 2, f"rank {rank}", rotation=90, ha="center")
        for expert in range(EXPERTS):
            mine = [token for token, chosen in enumerate(EXPERT_OF) if chosen == expert]
            first = tops[expert // per_rank * of_rank]
            y = first + 2.5 * (expert % per_rank)
            names = " ".join(f"t{token}" for token in mine)
            box(axes, 11.9, y, 4.3, 2.1, f"expert {expert}\n{names}", BY_RANK[expert])
            for place, token in enumerate(mine):
                port = y + 2.1 * (place + 1) / (len(mine) + 1)
                middle = tops[token] + 0.45
                arrow(axes, (7.9, middle), (11.9, port), COLOURS[expert], linewidth=1.2)
                arrow(axes, (16.2, port), (23.1, middle), COLOURS[expert], linewidth=1.2)
        for token, chosen in enumerate(EXPERT_OF):
            y = tops[token]
            box(axes, 1.2, y, 2.6, 0.9, f"t{token}", PALE)
            arrow(axes, (3.8, y + 0.45), (4.6, y + 0.45), linewidth=0.9)
            box(axes, 4.6, y, 3.3, 0.9, f"expert {chosen}", BY_RANK[chosen], fontsize=8)
            box(axes, 23.1, y, 3.0, 0.9, f"p · e{chosen}(t{token})", BY_RANK[chosen], fontsize=8)


PICTURES = {"expert-routing": expert_routing}
