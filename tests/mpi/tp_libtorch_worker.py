"""Compare the module tp_libtorch with the plain Transformer, on groups of every size up to all ranks.

libtorch_worker.py runs it under mpirun, spawned ranks on gloo.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mpi.said import said_by
from torch import Tensor, nn

from common.comm import sizes_of
from common.models.configs import gpt2
from common.models.transformer import Layer, cross_entropy_sum

import tp_libtorch

HEADS, VOCABULARY = 24, 11
CONFIG = gpt2(layers=1, width=48, heads=HEADS, sequence=8)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def apart(a: Tensor, b: Tensor | None) -> float:
    """Return max |a - b| / max |a|; inf if b is missing."""
    return float("inf") if b is None else ((a - b).abs().max() / a.abs().max()).item()


def piece(whole: Tensor, dim: int, ranks: Any) -> Tensor:
    if dim < 0:
        return whole
    return whole.split(sizes_of(whole.shape[dim], ranks.size), dim)[ranks.rank]


def sent(ranks: Any, numbers_: int) -> list[int]:
    """Return [counted, by formula] (bytes this rank sent) x (ranks n): 2 (n-1) x 8 for each of `numbers_`."""
    return [sum(n_bytes for _, n_bytes, _ in ranks.take_messages()), 2 * (ranks.size - 1) * numbers_ * 8]


def layers(ranks: Any) -> dict[str, Any]:
    """Compare our layer with the plain one: result, gradients of x and parameters, bytes each way."""
    plain = Layer(CONFIG).double()
    for i, p in enumerate(plain.parameters()):
        p.data = 0.3 * numbers(*p.shape, seed=i)
    whole = dict(plain.named_parameters())
    mine = tp_libtorch.split(whole, ranks)
    x, w = numbers(2, 8, 48, seed=100), numbers(2, 8, 48, seed=101)
    their_x, our_x = (x.clone().requires_grad_() for _ in range(2))
    theirs = plain(their_x, torch.arange(8))
    (theirs * w).sum().backward()
    ours = tp_libtorch.layer(our_x, mine, HEADS, ranks)
    found: dict[str, Any] = {"forward bytes": sent(ranks, 2 * x.numel())}
    (ours * w).sum().backward()
    found["backward bytes"] = sent(ranks, 2 * x.numel())
    found |= {"y": apart(theirs, ours), "x": apart(their_x.grad, our_x.grad)}
    for name, p in whole.items():
        if name != "attention.k_proj.bias":  # softmax is invariant to it: its gradient is 0
            found[name] = apart(
                piece(p.grad, tp_libtorch.split_dimension(name), ranks) / p.grad.abs().max(),
                mine[name].grad / p.grad.abs().max(),
            )
    return found


def ends(ranks: Any) -> dict[str, Any]:
    """Compare vocabulary-parallel embedding, head and loss with the plain ones; some targets are ignored."""
    plain = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
    plain.weight.data = numbers(VOCABULARY, 6)
    (mine,) = tp_libtorch.split({"embed_tokens.weight": plain.weight}, ranks).values()
    tokens = torch.arange(15).view(3, 5) % VOCABULARY
    targets = torch.where(tokens == 4, -100, (tokens * 7 + 3) % VOCABULARY)
    x = plain(tokens)
    logits = F.linear(x + 1, plain.weight) * 100  # exp overflows unless the largest is subtracted
    theirs, count = cross_entropy_sum(logits, targets)
    theirs.backward()
    our_x = tp_libtorch.embedding(tokens, mine, VOCABULARY, ranks)
    (our_logits,) = tp_libtorch.column_parallel(our_x + 1, [mine], [], ranks)
    ours, our_count = tp_libtorch.cross_entropy_sum(our_logits * 100, targets, VOCABULARY, ranks)
    ours.backward()
    return {
        "embedding": apart(x, our_x),
        "loss": apart(theirs, ours),
        "count": abs(count.item() - our_count.item()),
        "tied weight": apart(piece(plain.weight.grad, 0, ranks), mine.grad),
        "bytes": sent(ranks, 2 * x.numel() + 3 * targets.numel()),
    }


def pair(ranks: Any) -> dict[str, Any]:
    """Check copy and reduce, alone and around column- and row-parallel products, and without copy."""
    n = ranks.size
    first, second = numbers(12, 5), numbers(4, 12, seed=1)
    x, w = numbers(3, 5, seed=2), numbers(3, 4, seed=3)
    their_x = x.clone().requires_grad_()
    (F.linear(F.linear(their_x, first), second) * w).sum().backward()
    a, b = piece(first, 0, ranks), piece(second, 1, ranks)
    found: dict[str, Any] = {}
    for name, enter in {"with copy": tp_libtorch.copy, "without": lambda x, _: x}.items():
        our_x = x.clone().requires_grad_()
        (tp_libtorch.reduce(F.linear(F.linear(enter(our_x, ranks), a), b), ranks) * w).sum().backward()
        found[name] = apart(their_x.grad, our_x.grad)
    our_x = x.clone().requires_grad_()
    (h,) = tp_libtorch.column_parallel(our_x, [a], [], ranks)
    (tp_libtorch.row_parallel(h, b, None, ranks) * w).sum().backward()
    found["column, row"] = apart(their_x.grad, our_x.grad)
    frozen = x.clone()  # requires no gradient, so none is sent
    ranks.take_messages()
    weight = a.clone().requires_grad_()
    tp_libtorch.column_parallel(frozen, [weight], [], ranks)[0].sum().backward()
    found["bytes"] = sent(ranks, 0)
    total = tp_libtorch.reduce(torch.ones(2, dtype=torch.float64), ranks)
    found["ones"] = apart(torch.full((2,), float(n), dtype=torch.float64), total)
    return found


def refused(ranks: Any) -> list[str]:
    """Return the module's errors for invalid arguments, each raised before any message is sent."""
    x = torch.ones(1, 2, 48)
    mine = tp_libtorch.split(dict(Layer(CONFIG).named_parameters()), ranks)
    row = torch.ones(1, 4, requires_grad=True)
    mine_of_12 = piece(torch.ones(12, 2), 0, ranks)

    def twice() -> None:
        y = tp_libtorch.reduce(tp_libtorch.copy(row, ranks), ranks)
        torch.autograd.grad(y.sum(), row, create_graph=True)

    calls = [
        lambda: tp_libtorch.layer(x, mine, 25, ranks),
        lambda: tp_libtorch.layer(x, {"mlp.up_proj.weight": x}, HEADS, ranks),
        lambda: tp_libtorch.split({"embed_tokens.weight": torch.ones(1, 4)}, ranks),
        lambda: tp_libtorch.embedding(torch.zeros(1, 2).long(), torch.ones(9, 2), 12, ranks),
        lambda: tp_libtorch.cross_entropy_sum(mine_of_12.T, torch.tensor([3, 12]), 12, ranks),
        lambda: tp_libtorch.column_parallel(row, [row], [row, row], ranks),
        twice,
    ]
    return said_by(calls)


def outcomes(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Run all checks on one group."""
    ranks = tp_libtorch.Ranks(group)
    return {
        "layer": layers(ranks),
        "ends": ends(ranks),
        "pair": pair(ranks),
        "refused": refused(ranks) if ranks.size > 1 else [],
    }


def on_mpi() -> dict[int, list[Any]]:
    """Run all checks on each group size, under mpirun. The import is here because it starts MPI."""
    from mpi.worker import on_groups

    return on_groups(outcomes)
