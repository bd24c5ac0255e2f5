"""Compare sp_libtorch with scaled_dot_product_attention, on groups of every size up to all ranks.

libtorch_worker.py runs it under mpirun, spawned ranks on gloo.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi.said import said_by
from torch import Tensor

import sp_libtorch

ORDERS, KERNELS = ("contiguous", "zigzag"), ("library", "plain")
# batch, query heads, heads of keys, width: grouped, all alike, one for all
SHAPES = ((2, 4, 2, 8), (1, 3, 3, 5), (1, 4, 1, 16))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def apart(whole: Tensor | None, places: Tensor, part: Tensor | None) -> float:
    """Return max |whole - part| / max |whole| over the positions `places`; inf if one is missing."""
    if whole is None or part is None:
        return float("inf")
    return ((whole[:, :, places] - part).abs().max() / whole.abs().max()).item()


def attention(
    ranks: Any, shape: tuple[int, ...], sequence: int, causal: bool, order: str, kernel: str
) -> Any:
    """Return [largest difference of o, dq, dk, dv; bytes x ranks, counted; by formula]."""
    B, H, G, K = shape
    whole = [numbers(B, heads, sequence, K, seed=i) for i, heads in enumerate((H, G, G, H))]
    places = sp_libtorch.places(sequence, ranks, order)
    mine = [x[:, :, places] for x in whole]
    for x in (*whole[:3], *mine[:3]):
        x.requires_grad_()
    theirs = F.scaled_dot_product_attention(*whole[:3], is_causal=causal, enable_gqa=True)
    (theirs * whole[3]).sum().backward()
    ranks.take_messages()
    ours = sp_libtorch.ring_attention(*mine[:3], causal, ranks, order, kernel)
    (ours * mine[3]).sum().backward()
    pairs = [(theirs, ours), *((x.grad, y.grad) for x, y in zip(whole[:3], mine[:3], strict=True))]
    counted = sum(n_bytes for _, n_bytes, _ in ranks.take_messages())
    formula = 3 * (ranks.size - 1) * 2 * B * G * sequence * K * 8
    return [max(apart(a, places, b) for a, b in pairs), counted, formula]


def every(ranks: Any) -> dict[str, Any]:
    found = {}
    for case in itertools.product(SHAPES[:1], (48,), (True, False), ORDERS, KERNELS):
        found[str(case)] = attention(ranks, *case)
    for order in ORDERS:  # several of the kernel's tiles
        found[f"long, {order}"] = attention(ranks, (1, 2, 1, 4), 48 * 13, True, order, "library")
    for shape in SHAPES[1:]:
        found[str(shape)] = attention(ranks, shape, 48, True, "zigzag", "library")
        found[str(shape) + " plain"] = attention(ranks, shape, 48, True, "zigzag", "plain")
    return found


def places(ranks: Any) -> dict[str, list[int]]:
    return {order: sp_libtorch.places(4 * ranks.size, ranks, order).tolist() for order in ORDERS}


def float32_and_layout(ranks: Any) -> dict[str, Any]:
    """Compare in float32, in the layout [B, S, H, K] transposed, and with an expanded scalar gradient."""
    mine = sp_libtorch.places(48, ranks, "zigzag")
    x = [numbers(2, 48, 4, 8, seed=i).requires_grad_() for i in range(3)]
    y = [each.detach()[:, mine].clone().requires_grad_() for each in x]
    theirs = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in x), is_causal=True)
    theirs.sum().backward()
    ours = sp_libtorch.ring_attention(*(each.transpose(1, 2) for each in y), True, ranks, "zigzag")
    ours.sum().backward()
    turned = max(
        ((a.grad[:, mine] - b.grad).abs().max() / a.grad.abs().max()).item()
        for a, b in zip(x[1:], y[1:], strict=True)
    )
    single = [each.detach().float().transpose(1, 2) for each in y]
    low = sp_libtorch.ring_attention(*single, True, ranks, "zigzag")
    return {"turned": turned, "float32": apart(theirs, mine, low.double()), "type": str(low.dtype)}


def refused(ranks: Any) -> list[str]:
    """Return the module's errors for invalid arguments, each raised before any message is sent."""
    q, k, odd = torch.ones(1, 4, 6, 8), torch.ones(1, 3, 6, 8), torch.ones(1, 4, 3, 8)
    meta = q.to("meta")
    leaf = q.clone().requires_grad_()
    calls = [
        lambda: sp_libtorch.places(10, ranks, "zigzag"),
        lambda: sp_libtorch.places(1, ranks),
        lambda: sp_libtorch.ring_attention(q, k, k, True, ranks),
        lambda: sp_libtorch.ring_attention(odd, odd, odd, True, ranks, "zigzag"),
        lambda: sp_libtorch.ring_attention(q, q, q, True, ranks, "spiral"),
        lambda: sp_libtorch.ring_attention(q, q, q, True, ranks, "zigzag", "fast"),
        lambda: sp_libtorch.ring_attention(meta, meta, meta, True, ranks),
        lambda: torch.autograd.grad(
            sp_libtorch.ring_attention(leaf, q, q, True, ranks).sum(), leaf, create_graph=True
        ),
    ]
    return said_by(calls)


def outcomes(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Run all checks on one group."""
    ranks = sp_libtorch.Ranks(group)
    return {
        "attention": every(ranks),
        "places": places(ranks),
        "others": float32_and_layout(ranks),
        "refused": refused(ranks),
    }


def on_mpi() -> dict[int, list[Any]]:
    """Run all checks on each group size, under mpirun. The import is here because it starts MPI."""
    from mpi.worker import on_groups

    return on_groups(outcomes)
