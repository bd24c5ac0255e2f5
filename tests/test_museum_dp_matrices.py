"""Museum of silent bugs, cut matrices: C is right to the last bit, and a gradient is one rank's share of it.

A loss curve goes down with such gradients, too, only slower. For each the broken version is run first and must be
caught, then the right one must pass.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dp_matrices import SPLITS, Factors, MatrixOptions
from dp_matrix_multiply import multiply
from torch import Tensor

from common import collectives
from common.comm import Group, sizes_of
from common.runtime import Runtime
from common.spawn import spawn


def nobody_sums(split: str, a: Tensor, b: Tensor, group: Group) -> Tensor:
    """Rows and columns need nothing forward, so nothing is written; but then autograd sends nothing backward."""
    return a @ b


def taken_for_the_same(split: str, a: Tensor, b: Tensor, group: Group) -> Tensor:
    """Every rank multiplied the gathered B by other rows, so its gradient is a part, not the whole."""
    return a @ collectives.gather(b, group, 0, "replicated", sizes_of(a.shape[1], group.size))


EXHIBITS = {
    "rows without a sum": (nobody_sums, "rows", "dB"),
    "columns without a sum": (nobody_sums, "columns", "dA"),
    "a gather of the wrong adjoint": (taken_for_the_same, "gathered", "dB"),
}
Multiply = Callable[[str, Tensor, Tensor, Group], Tensor]


def visit(rt: Runtime, version: Multiply, split: str) -> dict[str, float]:
    """Differences to numpy."""
    factors, lies = Factors(MatrixOptions(shape=(9, 8, 7)), rt.world, rt.device), SPLITS[split]
    a, b = factors.piece("A", lies.a).requires_grad_(), factors.piece("B", lies.b).requires_grad_()
    c = version(split, a, b, rt.world)
    c.backward(factors.piece("dC", lies.c))
    assert a.grad is not None
    assert b.grad is not None
    pieces = {"C": (c, lies.c), "dA": (a.grad, lies.a), "dB": (b.grad, lies.b)}
    return {name: factors.difference(name, x, dim) for name, (x, dim) in pieces.items()}


@pytest.mark.parametrize("name", EXHIBITS)
def test_caught(name: str) -> None:
    version, split, wrong = EXHIBITS[name]
    for found in spawn(visit, 2, version, split):
        print(f"\n{name}: " + "  ".join(f"{what} {d:.1e}" for what, d in found.items()), end="")
        assert found.pop(wrong) > 0.1
        assert max(found.values()) < 1e-12  # C, and the other gradient, show nothing


@pytest.mark.parametrize("split", SPLITS)
def test_right(split: str) -> None:
    for found in spawn(visit, 2, multiply, split):
        assert max(found.values()) < 1e-12
