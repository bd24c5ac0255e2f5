"""Differentiable collectives: each docstring states the placement of input and output, and the adjoint.

Along the group's axis a tensor is R(eplicated), S(harded on a dimension) or P(artial: to be summed).
n ranks, |x| bytes of the whole tensor; "sends" is per rank. The adjoint of a sum is a copy and the reverse;
the adjoint of taking a piece is putting it back. Tensor, sequence and expert parallelism need only this list.

    function          forward          backward (adjoint)     sends forward / backward
    copy              R -> R           P -> R  all-reduce     0            / 2(n-1)/n |x|
    reduce            P -> R           R -> R  nothing        2(n-1)/n |x| / 0
    scatter           R -> S  slice    S -> R  all-gather     0            / (n-1)/n |x|
    gather            S -> R           R -> S  slice          (n-1)/n |x|  / 0
    gather (partial)  S -> R           P -> S  reduce-scatter (n-1)/n |x|  / (n-1)/n |x|
    reduce_scatter    P -> S           S -> R  all-gather     (n-1)/n |x|  / (n-1)/n |x|
    all_to_all        S(a) -> S(b)     S(b) -> S(a)           (n-1)/n |s|  / (n-1)/n |s|   (s: this rank's shard)
    shift             x of rank r-k    gradient of rank r+k   |s|          / |s|

R in the backward column means that every rank holds the same, complete gradient; P that each holds a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from common import comm
from common.comm import Group, sizes_of
from common.comm.hooks import typed

Map = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """A linear map and its adjoint: the backward of y = A x is dx = A^T dy, whose own backward is A again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, map: Map, adjoint: Map) -> Tensor:
        ctx.map, ctx.adjoint = map, adjoint
        return map(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return linear_map(grads[0], ctx.adjoint, ctx.map), None, None


def linear_map(x: Tensor, map: Map, adjoint: Map) -> Tensor:
    """Return map(x); the gradient is `adjoint` of the result's gradient."""
    if not torch.is_grad_enabled():
        return map(x)
    return cast(Tensor, _Linear.apply(x, map, adjoint))


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total, group)
    return total


def _piece(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank]).contiguous()


@typed("I", "R")
def copy(x: Tensor, group: Group) -> Tensor:
    """R to R; the gradients, a part on each rank, are summed. Megatron's f (arXiv:1909.08053, section 3)."""
    return linear_map(x, _same, lambda dy: _summed(dy, group))


@typed("PV", "I")
def reduce(x: Tensor, group: Group) -> Tensor:
    """P to R: the sum over ranks; the gradient is unchanged. Megatron's g (arXiv:1909.08053, section 3)."""
    return linear_map(x, lambda x: _summed(x, group), _same)


@typed("I", "S")
def scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """R to S(dim): this rank's piece, lengths as `sizes_of` cuts; the gradients are all-gathered."""
    sizes = sizes_of(x.shape[dim], group.size)
    return linear_map(
        x, lambda x: _piece(x, group, dim, sizes), lambda dy: comm.all_gather(dy, group, dim, sizes)
    )


@typed("SV", "I")
def gather(
    x: Tensor,
    group: Group,
    dim: int,
    gradient: Literal["replicated", "partial"] = "replicated",
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """S(dim) to R. gradient: placement of the result's gradient, the same on all ranks or a part on each.

    sizes: each rank's length along dim, if they differ.
    """
    lengths = list(sizes or [x.shape[dim]] * group.size)
    take = comm.reduce_scatter if gradient == "partial" else _piece
    return linear_map(
        x, lambda x: comm.all_gather(x, group, dim, lengths), lambda dy: take(dy, group, dim, lengths)
    )


@typed("PV", "S")
def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """P to S(dim): this rank's piece of the sum, as `sizes_of` cuts; the gradients are all-gathered."""
    sizes = sizes_of(x.shape[dim], group.size)
    return linear_map(
        x,
        lambda x: comm.reduce_scatter(x, group, dim, sizes),
        lambda dy: comm.all_gather(dy, group, dim, sizes),
    )


@typed("SV", "V")
def all_to_all(
    x: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None = None,
    receive_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Piece j of dimension 0 to rank j; the gradients go back the same way.

    send_sizes, receive_sizes: lengths along dimension 0 to and from each rank; default: equal lengths.
    """
    return linear_map(
        x,
        lambda x: comm.all_to_all(x, group, send_sizes, receive_sizes),
        lambda dy: comm.all_to_all(dy, group, receive_sizes, send_sizes),
    )


@typed("SV", "V")
def shift(x: Tensor, group: Group, by: int = 1) -> Tensor:
    """Round the ring: x of rank r goes to rank r + by; the gradients go back. Shapes are equal on all ranks."""
    return linear_map(x, lambda x: comm.shift(x, group, by), lambda dy: comm.shift(dy, group, -by))
