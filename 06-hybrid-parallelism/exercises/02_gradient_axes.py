"""Axes over which each gradient is summed.

One rule decides: a gradient is summed over exactly the axes along which tokens are split and its parameter is
replicated. Where tokens are not split, every rank has computed the same gradient, and a sum would count it several
times; where the parameter is split, each rank's part belongs to it alone.

Write `gradient_axes(name, shape, sequence_parallel)` for a Transformer with experts on a mesh:

    tokens       split over dp, ep and sp, always. Along pp and tp all ranks see the same ones, but with Megatron's
                 sequence parallelism (`sequence_parallel`) each rank along tp sees a slice of them between the
                 regions, so in the norms
    experts      `….mlp.experts.…`: whole experts split over ep, their matrices over tp
    matrices     q_proj, k_proj, v_proj, o_proj, lm_head and embed_tokens: split over tp
    norms        replicated
    router       `….mlp.router.weight`: replicated. Each rank along tp scales partial results of the experts by the
                 router's probabilities, so what comes back to the router is partial along tp too
    layers       owned by a stage along pp

`name` is the parameter's: embed_tokens.weight, layers.0.attention_norm.weight, layers.0.attention.q_proj.weight,
layers.0.mlp_norm.weight, layers.0.mlp.router.weight, layers.0.mlp.experts.up_proj.weight, norm.weight, lm_head.weight.
`shape` has the ranks along each axis: {"pp": 1, "dp": 2, "ep": 1, "sp": 1, "tp": 2}. An axis of one rank may be in the
result or not.

Targets: a real model on nine meshes of 4 ranks, whose gradients are summed as you say: every one equal to one device.
"""


def gradient_axes(name: str, shape: dict[str, int], sequence_parallel: bool) -> set[str]:
    """Return the axes over which the gradient of a parameter is summed."""
    raise NotImplementedError(
        "begin with the axes along which tokens are split, then take away those that split `name`"
    )
