"""Memory of a rank: parameters along tp, then ZeRO's shares along dp, then a layer's activations."""

from typing import Any


def memory(m: Any, dp: int, tp: int, zero: int, tokens: int) -> dict[str, float]:
    """Return the bytes of a rank's weights, gradients, states and activations."""
    D, F = m.width, m.mlp_width
    split = m.vocabulary * D + m.layers * (4 * D * D + 3 * D + 2 * D * F + F)
    whole = m.positions * D + m.layers * (4 * D + 2 * D) + 2 * D
    numbers = (split / tp + whole) * m.size
    kept = 2 * D + 4 + 2 * D + (4 * D + m.heads + 2 * F) / tp
    return {
        "weights": numbers / (dp if zero >= 3 else 1),
        "gradients": numbers / (dp if zero >= 2 else 1),
        "states": 2 * numbers / (dp if zero >= 1 else 1),
        "activations": m.layers * tokens * kept * m.size,
    }
