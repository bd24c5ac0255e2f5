"""Sequence parallelism, the simple way: every rank holds a piece of the sequence and gathers all keys and values.

    rank r's rows of attention  =  softmax(q_r k^T / sqrt(K)) v          k = [k_0 k_1 ... ], v likewise, from all ranks

                     rank 0              rank 1              rank 2
    tokens           0 1 2 3             4 5 6 7             8 9 10 11
    q, k, v          own tokens          own tokens          own tokens
                        \\_________ all-gather of k and v _______/
    attention        q_0 with 0..3       q_1 with 0..7       q_2 with 0..11      (causal: uneven work)
    backward            \\____ reduce-scatter of dk and dv ______/     each rank has a part of every key's gradient
    the rest         norms, projections, MLP, head, loss: one token at a time, no communication

The adjoint of the gather is a reduce-scatter, since the gradient of a gathered key is partial: the queries of each rank
add their part. Weights are on all ranks, and their gradients are summed over sp by the rule of common/placement.py.

Cost: a layer sends 2(n-1) times a rank's keys and values, 2 * 2(n-1) B s G K numbers. Memory: activations fall as 1/n,
but the gathered keys and values, 2 B S G K numbers a layer, do not. The same numbers as on one device.

    python sp_basic.py --nproc 4      torchrun --nproc_per_node=4 sp_basic.py      mpirun -np 4 python sp_basic.py

B batch  S sequence  s = S / n, a rank's tokens  H query heads  G key-value heads  K width of a head
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
import torch.nn.functional as F
from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_split import places
from sp_training import (
    SequenceOptions,
    bytes_of_run,
    bytes_of_step,
    check,
    make_batches,
    shape_bytes,
    sp_group,
    version,
)
from torch import Tensor, nn

from common import collectives
from common.comm import Group
from common.comparison import prove
from common.lesson import run
from common.models.transformer import Transformer
from common.runtime import Runtime
from common.training import Version

VERSIONS = ("allgather",)


@dataclass
class BasicOptions(SequenceOptions):
    """Which versions."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


def gathered_attention(q_BHsK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, causal: bool, group: Group) -> Tensor:
    """This rank's rows of attention, [B, H, s, K]; pieces lie in the order of the ranks.

    Keys later than all of this rank's queries are dropped before the product; the mask is for those beside them.
    """
    k_BGTK = collectives.gather(k_BGsK, group, 2, "partial")
    v_BGTK = collectives.gather(v_BGsK, group, 2, "partial")
    s, seen_sT = q_BHsK.shape[2], None
    if causal:
        before = group.rank * s
        k_BGTK, v_BGTK = k_BGTK[:, :, : before + s], v_BGTK[:, :, : before + s]
        seen_sT = torch.ones(s, before + s, dtype=torch.bool, device=q_BHsK.device).tril(before)
    grouped = q_BHsK.shape[1] != k_BGTK.shape[1]
    return F.scaled_dot_product_attention(q_BHsK, k_BGTK, v_BGTK, attn_mask=seen_sT, enable_gqa=grouped)


def attention_bytes(o: SequenceOptions, ranks: int) -> int:
    """Bytes a rank sends for a layer's attention, forward and backward: keys and values, and their gradients."""
    _, keys = shape_bytes(o, ranks)
    return 2 * (ranks - 1) * 2 * keys


def make_version(name: str, model: Transformer, rt: Runtime, o: SequenceOptions) -> Version:
    """The model with gathered attention."""
    return version(model, partial(gathered_attention, group=sp_group(rt)), rt)


def step_bytes(name: str, model: nn.Module, group: Group, o: SequenceOptions) -> Fraction:
    """Bytes a rank sends in a step."""
    return bytes_of_step(model, group, o, attention_bytes(o, group.size))


def run_bytes(name: str, model: nn.Module, group: Group, o: SequenceOptions) -> Fraction:
    """Bytes a rank sends in `o.steps` steps."""
    return bytes_of_run(model, group, o, attention_bytes(o, group.size))


def main(rt: Runtime, o: BasicOptions) -> bool:
    """Prove, or with --benchmark time."""
    check(rt, VERSIONS, o, ["contiguous"])
    if not o.benchmark:
        return prove(rt, o, make_version, run_bytes, step_bytes, (), make_batches=make_batches, axis="sp")
    n, s = rt.world_size, o.shape[0] // rt.world_size
    pairs = o.shape[1] * (s * (s + 1) // 2 + rt.rank * s * s)
    group = sp_group(rt)
    attend, mine = partial(gathered_attention, group=group), partial(places, group=group, order="contiguous")
    return attention_benchmark(
        rt,
        o,
        {"allgather": AttentionCase(attend, mine, pairs, 2 * (n - 1) * 2)},
    )


if __name__ == "__main__":
    run(main, BasicOptions)
