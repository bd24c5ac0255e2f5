"""C = A B on a grid of ranks (SUMMA): both factors cut twice, panels broadcast along rows and columns.

    C(r, c)  =  sum over panels p of  A(r, p) B(p, c)          dA = dC B^T          dB = A^T dC

    2 x 2 ranks, panel p          A           B           C        p belongs to grid column 1 for A and to grid
                               . | p       . | .       + | +       row 1 for B: their ranks broadcast it along
                               --+--       --+--       --+--       the rows (A) and the columns (B), then every
                               . | p       p | p       + | +       rank adds a product to its own block of C

    backward                   the same broadcasts; terms of dA are summed along the row to the owner of the panel,
                               terms of dB along the column

Cost per rank on R x C ranks: forward (C-1)/C of a block row of A and (R-1)/R of a block column of B, backward
twice that. For N x N on sqrt(n) x sqrt(n) that is about 2 N^2/sqrt(n) numbers; a split in one dimension sends
about N^2 on any n. Memory: 1/n of A, B and C, and two panels. L layers (--layers) each take 1/L of the sum
and add C up at the end: they send about 2 N^2/sqrt(L n) + (L-1) N^2/n and hold L times as much of C ("2.5D",
Solomonik and Demmel, Euro-Par 2011). SUMMA: van de Geijn and Watts, Concurrency 9(4), 1997. Cannon's product,
on square grids: tp_cannon.py.

    python tp_summa.py --nproc 4                       torchrun --nproc_per_node=4 tp_summa.py
    python tp_summa.py --nproc 6 --grid 3 2            python tp_summa.py --nproc 8 --layers 2
    mpirun -np 2 --bind-to core python tp_summa.py --benchmark --shape 4096 4096 4096 --dtype float32
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from common import comm
from common.comm import Pending
from common.launch.runtime import Runtime
from common.lesson.matrices import Products, Way, run_products
from common.lesson.runner import DTYPES, run

from tp_cannon import Cannon
from tp_grid import Blocks, GridOptions, Panel, make_grid, panels
from tp_grid_costs import table
from tp_grid_product import Method, bytes_by_formula, multiply, prepared
from tp_summa_peers import dtensor


class Summa:
    """SUMMA's product of blocks that are distributed as `Blocks` describes, with buffers allocated once.

    each: number of panels in which a block travels. overlap: broadcast the next panel while one is
    multiplied.
    """

    def __init__(self, blocks: Blocks, like: Tensor, each: int = 1, overlap: bool = True) -> None:
        self.blocks, self.grid, self.overlap = blocks, blocks.grid, overlap
        self.panels = panels(blocks.inner, blocks.grid, each)
        self.m, self.j = (x.stop - x.start for x in (blocks.rows, blocks.columns))
        longest = max((p.end - p.begin for p in self.panels), default=0)
        self.work_a, self.work_b = (
            [like.new_empty(longest * length) for _ in range(2)] for length in (self.m, self.j)
        )

    def mine(self, p: Panel, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the panel in this rank's blocks of A and B, each valid only on its owner."""
        of_a, of_b = self.blocks.place("A")[1].start, self.blocks.place("B")[0].start
        return a[:, p.begin - of_a : p.end - of_a], b[p.begin - of_b : p.end - of_b]

    def start(self, i: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, list[Pending]]:
        """Start to broadcast panel i; return (A(r, p), B(p, c), broadcasts); wait before using the blocks."""
        p, row, column = self.panels[i], self.grid.row, self.grid.column
        k = p.end - p.begin
        a_mk, b_kj = (
            self.work_a[i % 2][: self.m * k].view(self.m, k),
            self.work_b[i % 2][: k * self.j].view(k, self.j),
        )
        own_a, own_b = self.mine(p, a, b)
        if row.rank == p.column:  # columns of a block have gaps in memory, a whole block has not
            a_mk = own_a if own_a.is_contiguous() or row.size == 1 else a_mk.copy_(own_a)
        if column.rank == p.row:
            b_kj = own_b
        moving = [
            comm.broadcast(x, line, src, async_op=self.overlap)
            for x, line, src in ((a_mk, row, p.column), (b_kj, column, p.row))
            if x.numel() and line.size > 1
        ]
        return a_mk, b_kj, moving if self.overlap else []

    def each_panel(self, a: Tensor, b: Tensor, use: Callable[[Panel, Tensor, Tensor], object]) -> None:
        """Call use(p, A(r, p), B(p, c)) for every panel."""
        started = [self.start(0, a, b)] if self.panels else []
        for i, p in enumerate(self.panels):
            a_mk, b_kj, moving = started.pop()
            for pending in moving:
                pending.wait()
            if i + 1 < len(self.panels):
                started.append(self.start(i + 1, a, b))  # into memory that was last read two panels ago
            use(p, a_mk, b_kj)

    def multiply(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        """Write this rank's block of A B into c."""
        if not self.panels:
            c.zero_()
        self.each_panel(a, b, lambda p, a_mk, b_kj: c.addmm_(a_mk, b_kj, beta=int(p is not self.panels[0])))

    def gradients(self, a: Tensor, b: Tensor, dc: Tensor, da: Tensor, db: Tensor) -> None:
        """Write this rank's blocks of dA = dC B^T and dB = A^T dC into da and db."""

        def add(p: Panel, a_mk: Tensor, b_kj: Tensor) -> None:
            own_da, own_db = self.mine(p, da, db)
            for term, own, line, owner in (
                (dc @ b_kj.T, own_da, self.grid.row, p.column),
                (a_mk.T @ dc, own_db, self.grid.column, p.row),
            ):
                if term.numel():
                    comm.reduce(term, line, owner)
                if line.rank == owner:
                    own.copy_(term)

        self.each_panel(a, b, add)

    def bytes(self, item: int) -> tuple[Fraction, Fraction]:
        """Return the bytes this rank sends (forward, backward), by formula. item: bytes per number."""
        R, C, K = self.grid.rows, self.grid.columns, self.blocks.inner.stop - self.blocks.inner.start
        once = (Fraction((C - 1) * self.m, C) + Fraction((R - 1) * self.j, R)) * K * item
        return once, 2 * once


def make_method(name: str, blocks: Blocks, like: Tensor, o: GridOptions) -> Method:
    """Return the method `name`, "summa" or "cannon"."""
    return Cannon(blocks, like) if name == "cannon" else Summa(blocks, like, o.panels, o.overlap)


def products(rt: Runtime, o: GridOptions) -> Products:
    """Return the chosen algorithms on a grid of these ranks."""
    o.validate(rt.world_size)
    assert o.grid is not None
    grid = make_grid(rt.world, *o.grid, o.layers, rt.timeout)
    blocks, like = Blocks(o.shape, grid), torch.empty(0, dtype=DTYPES[o.dtype], device=rt.device)
    ways = {}
    for name in o.algorithms:
        method = make_method(name, blocks, like, o)
        ways[name] = Way(
            {matrix: blocks.place(matrix) for matrix in "ABC"},
            blocks.inner,
            partial(multiply, method=method),
            partial(prepared, method=method),
            bytes_by_formula(method, like.itemsize),
            partial(dtensor, blocks=blocks) if name == "summa" else lambda a, b: {},
        )
    where = f"{grid.rows} x {grid.columns} ranks" + (f" in {grid.layers} layers" if grid.layers > 1 else "")
    return Products("tp", ("product",), where, ways, (table((4096, 4096, 4096)),))


def main(rt: Runtime, o: GridOptions) -> bool:
    """Prove equality with numpy, or with --benchmark time and check some rows."""
    return run_products(rt, o, products(rt, o))


if __name__ == "__main__":
    run(main, GridOptions)
