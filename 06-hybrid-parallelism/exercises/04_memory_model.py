"""Memory of a rank before it runs.

Predict the bytes that a rank holds when GPT-2 trains on a mesh of dp x tp with AdamW and ZeRO along dp.

    parameters       whole size              along tp
    token embedding  V x D, tied with head   V rows split
    positions        S x D                   whole
    per layer:
      two norms      2 D each                whole
      q, k, v        D x D and a bias D      output features split, their biases too
      o              D x D and a bias D      input features split, the bias whole
      up             D x F and a bias F      output features split, its bias too
      down           F x D and a bias D      input features split, the bias whole
    last norm        2 D                     whole

Weights, gradients and AdamW's two states have `size` bytes for each number. ZeRO splits them over the dp ranks: stage 1
the states, stage 2 the gradients too, stage 3 the weights as well.

A layer keeps for the backward pass, per token: the inputs of its two norms and two numbers for each norm (2 D + 4); the
outputs of the norms, which the regions take (2 D); and inside the regions, split over tp: q, k, v and the result of
attention (4 D), one number for each of the H heads, and the MLP before and after its GELU (2 F).

Write `memory(m, dp, tp, zero, tokens)`, which returns the bytes of "weights", "gradients", "states" and "activations"
(of all layers, for `tokens` tokens on this rank) as a dict. `m` has the fields layers, width (D), mlp_width (F),
heads (H), vocabulary (V), positions (S) and size.

Targets: within 5 % of what real training steps on four ranks hold: every stage of ZeRO, two meshes.
"""

from typing import Any


def memory(m: Any, dp: int, tp: int, zero: int, tokens: int) -> dict[str, float]:
    """Return the bytes of a rank's weights, gradients, states and activations."""
    raise NotImplementedError(
        "count the parameters on a rank along tp: those that are split, divided by tp, and the whole ones"
    )
