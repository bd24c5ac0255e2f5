"""The product of two tensors over named dimensions, and all ways to split it over the axes of a grid.

    a [m, k], b [k, n] -> c [m, n]           what each rank of an axis holds, by the dimension that the axis splits

        rows      m    a split, b whole     each rank makes rows of c
        columns   n    a whole, b split     each makes columns of c
        inner     k    both split           each makes a term of c; the terms are summed and split
        batch          all split            each makes some of the products

Each axis of the grid splits one dimension, so that two axes have (rows, columns), a block of c for each rank, and
three have (inner, rows, columns): the 2.5-dimensional product, which keeps as many copies of a and b as the first
axis is long and sends less (Solomonik and Demmel, "Communication-optimal parallel 2.5D matrix multiplication and LU
factorization algorithms", 2011).
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from common.errors import UsageError
from common.tensors.cost import Cost, Way, moving, received
from common.tensors.layout import Layout, Partial, Placement, Replicate, Shard, together
from common.tensors.rates import Term
from common.tensors.tensor import DistributedTensor, brought, settled, to_layout
from common.tensors.transfer import bytes_sent


class Pair:
    """a and b with a label for each dimension, and the labels of the result. Every label of one operand alone is in
    the result; labels of both are batch dimensions if they are in the result, and inner ones otherwise.
    """

    def __init__(self, a: DistributedTensor, b: DistributedTensor, labels: tuple[str, str, str]) -> None:
        self.a, self.b, (self.of_a, self.of_b, self.of_c) = a, b, labels
        self.grid = a.grid
        self.length = dict(zip(self.of_a + self.of_b, (*a.shape, *b.shape), strict=True))
        self.key = (a.layout, b.layout, a.dtype, b.dtype, labels)
        self.dtype = torch.promote_types(a.dtype, b.dtype)
        if self.dtype == torch.bool:
            raise UsageError("a product of tensors of bool; convert them, as in x.to(torch.float32)")
        both = set(self.of_a) & set(self.of_b)
        self.kinds = {
            "batch": [x for x in self.of_c if x in both],
            "rows": [x for x in self.of_c if x in self.of_a and x not in both],
            "columns": [x for x in self.of_c if x in self.of_b and x not in both],
            "inner": [x for x in self.of_a if x in both and x not in self.of_c],
        }

    def placement(self, label: str, axis: int, labels: str) -> Placement:
        """Return how an axis that splits `label` splits a tensor of these labels: as an operand lies that it splits."""
        if not label or label not in labels:
            return Replicate()
        for x, of in ((self.a, self.of_a), (self.b, self.of_b)):
            p = x.placements[axis]
            if isinstance(p, Shard) and of[p.dim] == label:
                return Shard(labels.index(label), p.sizes)
        return Shard(labels.index(label))

    def layouts(self, split: Sequence[str]) -> tuple[Layout, Layout, Layout]:
        """Return how a, b and c lie if axis i splits the dimension `split[i]`."""
        found = []
        for labels, is_result in ((self.of_a, False), (self.of_b, False), (self.of_c, True)):
            placements: list[Placement] = []
            for axis, label in enumerate(split):
                p = self.placement(label, axis, labels)
                inner = is_result and label not in self.of_c
                placements.append(Partial() if inner else p)
            shape = [self.length[x] for x in labels]
            found.append(Layout.of(self.grid, shape, together(placements)))
        return found[0], found[1], found[2]

    def ways(self, whole: bool = False) -> list[Way]:
        """Return a way for each kind of dimension that each axis can split: of a kind, the longest dimension.

        whole: also that in which an axis splits none, and all of its ranks compute the same.

        Among dimensions of a kind, those that an operand is split along already come first.
        """
        choices: list[list[tuple[str, str]]] = []
        for axis, n in enumerate(self.grid.shape):
            cut = {
                of[p.dim]
                for x, of in ((self.a, self.of_a), (self.b, self.of_b))
                if isinstance(p := x.placements[axis], Shard)
            }
            found = []
            for kind, labels in self.kinds.items():
                if labels:
                    found.append(
                        (kind, max(labels, key=lambda x: (min(self.length[x], n), x in cut, self.length[x])))
                    )
            choices.append([*found, ("whole", "")] if whole or not found else found)
        return [
            self.way(" x ".join(kind for kind, _ in chosen), [label for _, label in chosen])
            for chosen in itertools.product(*choices)
        ]

    def way(self, name: str, split: Sequence[str]) -> Way:
        """Return the way in which axis i splits the dimension `split[i]`; "" splits none."""

        def cost() -> Cost:
            for_a, for_b, c = self.layouts(split)
            end, kind = settled(c), self.dtype
            moves = (
                (self.a.layout, for_a, self.a.dtype),
                (self.b.layout, for_b, self.b.dtype),
                (c, end, kind),
            )
            terms = [term for move in moves for term in moving(*move)]
            terms.append(Term("product", self.product_sizes(split), kind))
            memory = sum(received(*move) for move in moves) + c.largest * kind.itemsize
            sent = sum((bytes_sent(x, to, of.itemsize) for x, to, of in moves), Fraction(0))
            return Cost(tuple(terms), memory, sent)

        def run() -> DistributedTensor:
            for_a, for_b, c = self.layouts(split)
            pieces = [
                brought(x, to, [i for i, label in enumerate(split) if label and label not in of])
                for x, to, of in ((self.a, for_a, self.of_a), (self.b, for_b, self.of_b))
            ]
            return to_layout(DistributedTensor(self.multiply(*pieces), c), settled(c))

        return Way(name, run, cost)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two pieces, by one batched matrix product."""
        a, b = a.to(self.dtype), b.to(self.dtype)
        if len(self.of_a) == len(self.of_b) == len(self.of_c) == 2 and not self.kinds["batch"]:
            m, k, n = (
                self.kinds["rows"][0],
                self.kinds["inner"][0] if self.kinds["inner"] else "",
                self.of_c[1],
            )
            if k and self.of_c[0] == m:
                return torch.mm(a if self.of_a[0] == m else a.T, b if self.of_b[1] == n else b.T)
        letters = dict(zip(dict.fromkeys(self.of_a + self.of_b), string.ascii_letters, strict=False))
        of_a, of_b, of_c = ("".join(letters[x] for x in of) for of in (self.of_a, self.of_b, self.of_c))
        return torch.einsum(f"{of_a},{of_b}->{of_c}", a, b)

    def product_sizes(self, split: Sequence[str]) -> tuple[int, int, int, int]:
        """Return (batch, m, k, n) of the product on the rank that has most."""
        lengths = dict(self.length)
        for layout, of in zip(self.layouts(split), (self.of_a, self.of_b), strict=False):
            for d, label in enumerate(of):
                lengths[label] = max(box[d][1] - box[d][0] for box in layout.boxes)
        batch, m, n, k = (
            math.prod(lengths[x] for x in self.kinds[kind]) for kind in ("batch", "rows", "columns", "inner")
        )
        return batch, m, k, n
