"""Museum of silent bugs, split matrices: C is right to the last bit, but a gradient is a partial sum.

With such gradients a loss curve falls, too, only more slowly. For each bug the broken version runs first and
must be caught, then the right one must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor

from common.comm import Group, collectives, sizes_of
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.matrices import Product, multiplied

from dp_matrices import SPLITS, MatrixOptions
from dp_matrix_multiply import multiply, products


def nobody_sums(split: str, a: Tensor, b: Tensor, group: Group) -> Tensor:
    """Broken: no collective. Rows and columns need none forward, but autograd then sends nothing backward."""
    return a @ b


def taken_for_the_same(split: str, a: Tensor, b: Tensor, group: Group) -> Tensor:
    """Broken: takes the gathered B's gradient for complete, but ranks multiply B by different rows of A."""
    return a @ collectives.gather(b, group, 0, "replicated", sizes_of(a.shape[1], group.size))


EXHIBITS = {
    "rows without a sum": (nobody_sums, "rows", "dB"),
    "columns without a sum": (nobody_sums, "columns", "dA"),
    "a gather of the wrong adjoint": (taken_for_the_same, "gathered", "dB"),
}
Multiply = Callable[[str, Tensor, Tensor, Group], Tensor]


def visit(rt: Runtime, version: Multiply, split: str) -> dict[str, float]:
    """Return the differences from numpy."""
    o = MatrixOptions(shape=(9, 8, 7), splits=(split,))
    way = products(rt, o).ways[split]
    way = replace(way, multiply=partial(version, split, group=rt.world))
    return multiplied(Product(o, rt.device), way, rt.world)[0]


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
