"""Compare the module ep_libtorch with the plain mixture of experts, on groups of every size up to all ranks.

libtorch_worker.py runs it under mpirun, spawned ranks on gloo.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from mpi.said import said_by
from torch import Tensor

from common.comm import sizes_of
from common.data.text import rank_slice
from common.models.configs import TransformerConfig, mixtral, switch
from common.models.moe import Experts, MoE

import ep_libtorch

E, D = 9, 12  # nine experts divide over 3 ranks alone
MIXTRAL = mixtral(layers=1, width=D, heads=2, kv_heads=1, mlp_width=7, sequence=10, experts=E)
SWITCH = replace(switch(layers=1, width=D, heads=2, sequence=10, experts=E), capacity_factor=None)
CASES = {
    "mixtral": MIXTRAL,
    "switch": SWITCH,
    "three a token": replace(MIXTRAL, experts_per_token=3, router="softmax", bias=True),
}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apart(a: Tensor | None, b: Tensor | None, scale: Tensor | None = None) -> float:
    """Return max |a - b| / max |scale| (a by default): 0 if empty, inf if a shape differs or one is None."""
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    return ((a - b).abs().max() / (a if scale is None else scale).abs().max()).item() if a.numel() else 0.0


def plain_mixture(config: TransformerConfig, dtype: torch.dtype = torch.float64) -> MoE:
    moe = MoE(config).to(dtype)
    for i, p in enumerate(moe.parameters()):
        p.data = numbers(*p.shape, seed=i, dtype=dtype)
    return moe


def piece(whole: Tensor, name: str, ranks: Any) -> Tensor:
    return whole.split(sizes_of(E, ranks.size))[ranks.rank] if ep_libtorch.is_expert(name) else whole


def sent(ranks: Any) -> int:
    """Return (bytes that this rank sent since the last call) x (ranks)."""
    return sum(n_bytes for _, n_bytes, _ in ranks.take_messages())


def rows_between(counts_nE: list[Tensor], ranks: Any) -> int:
    """Return the number of rows that this rank sends to other ranks, plus those it receives from them."""
    rows_nn = torch.stack(
        [torch.stack([c.sum() for c in x.split(sizes_of(E, ranks.size))]) for x in counts_nE]
    )
    own = rows_nn[ranks.rank, ranks.rank]
    return int(rows_nn[ranks.rank].sum() + rows_nn[:, ranks.rank].sum() - 2 * own)


def mixtures(config: TransformerConfig, ranks: Any) -> dict[str, Any]:
    """Compare our mixture on each rank's own samples with the plain one on all samples, in two passes.

    Return the differences of results and gradients, and the bytes of either direction.
    """
    n, r, plain = ranks.size, ranks.rank, plain_mixture(config)
    whole = dict(plain.named_parameters())
    mine = ep_libtorch.split(whole, ranks)
    found: dict[str, Any] = {"y": 0.0, "x": 0.0}
    seen: list[Tensor] = []
    plain.observe = lambda routing: seen.append(routing.experts_BSK)
    others, passes = E - sizes_of(E, n)[r], 2
    for part in range(passes):
        x, w = numbers(2 * n + 1, 5, D, seed=50 + part), numbers(2 * n + 1, 5, D, seed=60 + part)
        slices = [rank_slice(len(x), rank, n) for rank in range(n)]
        lo, hi = slices[r]
        their_x, our_x = x.clone().requires_grad_(), x[lo:hi].clone().requires_grad_()
        theirs = plain(their_x)
        (theirs * w).sum().backward()
        rows = rows_between([torch.bincount(seen[-1][a:b].flatten(), minlength=E) for a, b in slices], ranks)
        ranks.take_messages()
        ours = ep_libtorch.mixture(our_x, mine, config.experts_per_token, config.router, ranks)
        found[f"forward bytes {part}"] = [sent(ranks), n * (8 * others + rows * D * 8)]
        (ours * w[lo:hi]).sum().backward()
        found[f"backward bytes {part}"] = [sent(ranks), n * rows * D * 8]
        found["y"] = max(found["y"], apart(theirs[lo:hi], ours, theirs))
        found["x"] = max(found["x"], apart(their_x.grad[lo:hi], our_x.grad, their_x.grad))
    ep_libtorch.sum_gradients(mine, ranks)
    found["sum bytes"] = [sent(ranks), 2 * (n - 1) * whole["router.weight"].numel() * 8]
    for name, p in whole.items():
        found[name] = apart(piece(p.grad, name, ranks), mine[name].grad, p.grad)
    return found


def odd_loads(ranks: Any) -> float:
    """Return the largest difference from the plain experts, in results and gradients, under uneven loads.

    The loads: all rows on one expert, no row for a rank's experts, a rank without a row, no row at all.
    """
    n, r, worst = ranks.size, ranks.rank, 0.0
    for config in (MIXTRAL, SWITCH):
        for per_rank in (
            [[4] + [0] * 8] * n,
            [[0] * 8 + [3]] * n,
            [[0] * 9] + [[1, 0, 2] * 3] * (n - 1),
            [[0] * 9] * n,
        ):
            experts = Experts(config).double()
            for i, p in enumerate(experts.parameters()):
                p.data = numbers(*p.shape, seed=i)
            whole = dict(experts.named_parameters())
            mine = ep_libtorch.split({f"experts.{name}": p for name, p in whole.items()}, ranks)
            for rank, counts in enumerate(map(torch.tensor, per_rank)):
                x = numbers(int(counts.sum()), D, seed=rank)
                their_x, our_x = x.clone().requires_grad_(), x.clone().requires_grad_()
                theirs = experts(their_x, counts)
                theirs.square().sum().backward()
                if rank == r:
                    ours = ep_libtorch.compute(our_x, counts, mine, ranks, "experts.")
                    ours.square().sum().backward()
                    pairs = [(theirs, ours), (their_x.grad, our_x.grad)]
            for name, p in whole.items():
                pairs.append((piece(p.grad, f"experts.{name}", ranks), mine[f"experts.{name}"].grad))
            scales = [a if bool(a.any()) else torch.ones(1) for a, _ in pairs if a.numel()]
            pairs = [(a, b) for a, b in pairs if a.numel()]
            worst = max(worst, *(apart(a, b, s) for (a, b), s in zip(pairs, scales, strict=True)), 0.0)
    return worst


def journey(ranks: Any) -> dict[str, Any]:
    """Check the order in which dispatch delivers rows (rank, expert, number).

    Check also that collect inverts dispatch, and that the gradient of dispatch does so, too.
    """
    n, r = ranks.size, ranks.rank
    counts_nE = [[(rank + expert) % 3 for expert in range(E)] for rank in range(n)]

    def rows_of(rank: int, expert: int) -> list[list[float]]:
        return [[rank, expert, i] for i in range(counts_nE[rank][expert])]

    rows = torch.tensor([row for e in range(E) for row in rows_of(r, e)], dtype=torch.float64)
    begin = sum(sizes_of(E, n)[:r])
    held = range(begin, begin + sizes_of(E, n)[r])
    expected = torch.tensor([row for e in held for rank in range(n) for row in rows_of(rank, e)])
    exchange = ep_libtorch.Exchange(torch.tensor(counts_nE[r]), ranks)
    rows.requires_grad_()
    arrived = ep_libtorch.dispatch(rows, exchange)
    back = ep_libtorch.collect(arrived * 1, exchange)
    (arrived * arrived.detach()).sum().backward()
    return {
        "counts": exchange.counts == [sum(counts_nE[rank][e] for rank in range(n)) for e in held],
        "arrived": torch.equal(arrived, expected.double()),
        "back": torch.equal(back, rows),
        "gradient": torch.equal(rows.grad, rows.detach()),
    }


def precisions(ranks: Any) -> dict[str, float]:
    """Return the differences in float32 and bfloat16.

    The router scores in float32, and the weights are not rounded before the sum.
    """
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        plain = plain_mixture(SWITCH, dtype)
        mine = ep_libtorch.split(dict(plain.named_parameters()), ranks)
        x = numbers(3, 4, D, seed=7, dtype=dtype)
        y = ep_libtorch.mixture(x, mine, 1, "softmax", ranks)
        found[str(y.dtype)] = apart(plain(x).double(), y.double())
    return found


def refused(ranks: Any) -> list[str]:
    """Return the module's errors for invalid arguments, each raised before any message is sent."""
    n = ranks.size
    mine = ep_libtorch.split(dict(plain_mixture(MIXTRAL).named_parameters()), ranks)
    x = numbers(2, 3, D, seed=0).requires_grad_()
    counts = torch.tensor([1] * E)
    exchange = ep_libtorch.Exchange(counts, ranks)

    def twice() -> None:
        y = ep_libtorch.mixture(x, mine, 2, "softmax", ranks)
        torch.autograd.grad(y.sum(), x, create_graph=True)

    calls = [
        lambda: ep_libtorch.split({"experts.up_proj.weight": torch.ones(n - 1, 2, 2)}, ranks),
        lambda: ep_libtorch.Exchange(torch.ones(n - 1).long(), ranks),
        lambda: ep_libtorch.mixture(x, mine, 10, "softmax", ranks),
        lambda: ep_libtorch.mixture(x, mine, 0, "softmax", ranks),
        lambda: ep_libtorch.mixture(x, mine, 2, "sigmoid", ranks),
        lambda: ep_libtorch.mixture(x, {"router.weight": mine["router.weight"]}, 2, "softmax", ranks),
        lambda: ep_libtorch.dispatch(x.flatten(0, 1), exchange),
        lambda: ep_libtorch.collect(x[0, :0], exchange),
        lambda: ep_libtorch.compute(x.flatten(0, 1), counts, mine, ranks, "experts."),
        lambda: ep_libtorch.experts(x.flatten(0, 1), [6], mine, "experts."),
        lambda: ep_libtorch.sum_gradients(mine, ranks),
        twice,
    ]
    return said_by(calls)


def outcomes(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Run all checks on one group."""
    ranks = ep_libtorch.Ranks(group)
    return {
        "mixtures": {name: mixtures(config, ranks) for name, config in CASES.items()},
        "odd loads": odd_loads(ranks),
        "journey": journey(ranks),
        "precisions": precisions(ranks),
        "refused": refused(ranks) if ranks.size == 2 else [],
    }


def on_mpi() -> dict[int, list[Any]]:
    """Run all checks on each group size, under mpirun. The import is here because it starts MPI."""
    from mpi.worker import on_groups

    return on_groups(outcomes)
