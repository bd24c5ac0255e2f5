"""Targets of the split MLP: shards, values, gradients, one all-reduce in each pass, activations kept.

B samples  S tokens  D width  F hidden features, f of this rank
"""

from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, sizes_of
from common.grade.targets import at_most, backpropagate, counted, exactly, holds, same, target
from common.utils.memory import LiveBytes, saved_bytes

ALLOWED = {"common.comm.collectives"}
B, S, D, HIDDEN = 2, 5, 6, 11
# shard: (whole parameter of [up, down], dimension that is cut)
SHARDS = {
    "up_weight_fD": (0, "weight", 0),
    "up_bias_f": (0, "bias", 0),
    "down_weight_Df": (1, "weight", 1),
    "down_bias_D": (1, "bias", None),
}


def whole(rng: torch.Generator) -> tuple[nn.Linear, nn.Linear, Tensor, Tensor]:
    """Return the MLP's two layers, an input and a gradient of the output, the same on all ranks."""
    up, down = nn.Linear(D, HIDDEN).double(), nn.Linear(HIDDEN, D).double()
    with torch.no_grad():
        for p in (*up.parameters(), *down.parameters()):
            p.copy_(torch.randn(p.shape, generator=rng, dtype=p.dtype))
    x_BSD, dy_BSD = (torch.randn(B, S, D, generator=rng, dtype=torch.float64) for _ in range(2))
    return up, down, x_BSD.requires_grad_(), dy_BSD


def part(x: Tensor, dim: int | None, group: Group) -> Tensor:
    """Return this rank's shard of a parameter or of its gradient."""
    return x if dim is None else x.split(sizes_of(HIDDEN, group.size), dim)[group.rank]


@target("each rank holds its shards and nothing else", ranks=(1, 2, 3))
def shards(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Values, memory of their own, no other parameters, buffers and hidden copies."""
    up, down, *_ = whole(rng)
    with LiveBytes() as live:
        mlp = mine.SplitMLP(up, down, group)
    held = {**dict(mlp.named_parameters()), **dict(mlp.named_buffers())}
    needed, names = 0, ", ".join(held) or "none"
    for name, (layer, kind, dim) in SHARDS.items():
        holds(name in held, f"there is no parameter {name}; the module has {names}")
        right = part(getattr((up, down)[layer], kind), dim, group)
        needed += right.nbytes
        same(name, held[name], right)
        at_most(
            f"bytes of memory behind {name} (a view keeps the whole tensor in memory: copy it)",
            held[name].untyped_storage().nbytes(),
            held.pop(name).nbytes,
        )
    holds(not held, f"the module also holds {', '.join(held)}")
    at_most("bytes that the module holds", live.now, needed + 128)  # 128 for indices


def one_device(up: nn.Linear, down: nn.Linear, x_BSD: Tensor) -> Tensor:
    """Return the MLP of x."""
    return down(F.gelu(up(x_BSD)))


def own_term(up: nn.Linear, down: nn.Linear, x_BSD: Tensor, group: Group) -> Tensor:
    """Return this rank's term of the result, without the bias."""
    up_bias_f, up_fD = part(up.bias, 0, group), part(up.weight, 0, group)
    return F.linear(F.gelu(F.linear(x_BSD, up_fD, up_bias_f)), part(down.weight, 1, group))


@target("y is that of one device", ranks=(1, 2, 3))
def values(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The mistakes that change y."""
    up, down, x_BSD, _ = whole(rng)
    y, term = one_device(up, down, x_BSD), own_term(up, down, x_BSD, group)
    mistakes = {
        "this rank's own term: nothing was added": term,
        "this rank's own term and the bias: nothing was added": term + down.bias,
        f"right but for the bias, which was added {group.size} times": y + (group.size - 1) * down.bias,
        "right but for the bias, which is missing": y - down.bias,
    }
    mlp = mine.SplitMLP(up, down, group)
    for p in (*up.parameters(), *down.parameters()):
        p.data.fill_(torch.nan)  # the whole layers are not kept
    same("y", mlp(x_BSD), y, mistakes)


@target("all gradients are those of one device", ranks=(1, 2, 3))
def gradients(mine: Any, group: Group, rng: torch.Generator) -> None:
    """From the end of the MLP to its beginning."""
    up, down, x_BSD, dy_BSD = whole(rng)
    mlp, own = mine.SplitMLP(up, down, group), x_BSD.detach().clone().requires_grad_()
    (term,) = torch.autograd.grad(own_term(up, down, x_BSD, group), x_BSD, dy_BSD)
    one_device(up, down, x_BSD).backward(dy_BSD)
    backpropagate("y", mlp(own), dy_BSD.clone())
    for name, (layer, kind, dim) in reversed(SHARDS.items()):
        right = part(getattr((up, down)[layer], kind).grad, dim, group)
        same(f"the gradient of {name}", getattr(mlp, name).grad, right)
    mistakes = {"this rank's own term: the terms of the other ranks are missing": term}
    same("the gradient of x", own.grad, x_BSD.grad, mistakes)


@target("one all-reduce in each pass", ranks=(2, 3))
def bytes_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Calls and bytes."""
    up, down, x_BSD, dy_BSD = whole(rng)
    mlp, n = mine.SplitMLP(up, down, group), group.size
    with counted("all_reduce") as forward:
        y = mlp(x_BSD)
    with counted("all_reduce") as backward:
        backpropagate("y", y, dy_BSD)
    for direction, ledger in (("forward", forward), ("backward", backward)):
        exactly(f"all-reduces in the {direction} pass", len(ledger.rows), 1)
        exactly(
            f"bytes that it sends in the {direction} pass",
            ledger.bytes(),
            Fraction(2 * (n - 1) * x_BSD.nbytes, n),
        )


@target("D + 2 f numbers per token are kept for the backward pass", ranks=(2, 3))
def kept(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Input, hidden features before and after the gelu; whole hidden features or weights would show here."""
    up, down, x_BSD, _ = whole(rng)
    mlp = mine.SplitMLP(up, down, group)
    f = sizes_of(HIDDEN, group.size)[group.rank]
    at_most("bytes kept for the backward pass", saved_bytes(lambda: mlp(x_BSD), mlp), 8 * B * S * (D + 2 * f))
