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
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Pending
from common.comm.ledger import Ledger, show_bytes
from common.launch.runtime import Runtime
from common.lesson.matrices import ALONE, Product, proved, record, timed, times_table
from common.lesson.measure import BenchmarkRecord, in_turn
from common.lesson.runner import DTYPES, console, run
from common.utils.visualizer import figure, throughput_bars

from tp_cannon import Cannon
from tp_grid import Blocks, Grid, GridOptions, Panel, make_grid, panels
from tp_grid_costs import table as costs_table
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


def prove(rt: Runtime, o: GridOptions, grid: Grid) -> bool:
    """Compare each product with numpy, forward and backward, and its bytes with the formula; then time it."""
    blocks = Blocks(o.shape, grid)
    factors = Product(o.shape, o.dtype, o.seed, rt.device)
    place, item = blocks.place, DTYPES[o.dtype].itemsize
    equality = Table(title="max|x - numpy| / max|numpy|", title_justify="left")
    for column in ("product", "C", "dA", "dB"):
        equality.add_column(column, justify="left" if column == "product" else "right")
    sent = Table(title="bytes a rank sent, mean", title_justify="left")
    for column in ("product", "forward", "by formula", "backward", "by formula"):
        sent.add_column(column, justify="left" if column == "product" else "right")
    largest, agree = 0.0, True
    for name in o.algorithms:
        a = factors.tensor("A", *place("A")).requires_grad_()
        b = factors.tensor("B", *place("B")).requires_grad_()
        method = make_method(name, blocks, a, o)
        with Ledger() as forward:
            c = multiply(a, b, method)
        with Ledger() as backward:
            c.backward(factors.tensor("dC", *place("C")))
        assert a.grad is not None
        assert b.grad is not None
        results = {"C": c, "dA": a.grad, "dB": b.grad}
        found = [factors.apart(what, x, *place(what), rt.world) for what, x in results.items()]
        largest = max(largest, *found)
        equality.add_row(name, *(f"{d:.1e}" for d in found))
        counted, formula = (forward.bytes(), backward.bytes()), bytes_by_formula(method, item)
        means = mean_over_ranks([counted[0], formula[0], counted[1], formula[1]], rt)
        sent.add_row(name, *(show_bytes(x) for x in means))
        agree &= counted == formula
    out = console(rt)
    M, K, J = o.shape
    where = f"{grid.rows} x {grid.columns} ranks" + (f" in {grid.layers} layers" if grid.layers > 1 else "")
    out.print(f"C = A B, {M} x {K} x {J}, {o.dtype}, on {where}")
    out.print(equality, sent, costs_table((4096, 4096, 4096)))
    return proved(rt, benchmark(rt, o, grid), o.json, largest, agree)


def mean_over_ranks(values: list[Fraction], rt: Runtime) -> list[Fraction]:
    """Return the means over ranks: where blocks differ by a row, ranks send different numbers of bytes."""
    shares = torch.tensor([float(x) for x in values], dtype=torch.float64, device=rt.device)
    comm.all_reduce(shares, rt.world)
    return [Fraction(x).limit_denominator(1000) / rt.world_size for x in shares.tolist()]


def benchmark(rt: Runtime, o: GridOptions, grid: Grid) -> list[BenchmarkRecord]:
    """Time in turn each product, its local part without messages (the ceiling), DTensor, one rank."""
    blocks = Blocks(o.shape, grid)
    factors = Product(o.shape, o.dtype, o.seed, rt.device)
    factors.axis = "tp"
    cases: dict[str, Callable[[], object]] = {"one rank": lambda: None}
    if rt.rank == 0:
        a_MK, b_KJ = factors.tensor("A"), factors.tensor("B")
        cases["one rank"] = partial(torch.mm, a_MK, b_KJ, out=a_MK.new_empty(o.shape[0], o.shape[2]))
    a, b = factors.tensor("A", *blocks.place("A")), factors.tensor("B", *blocks.place("B"))
    row_a, column_b = (
        factors.tensor("A", blocks.rows, blocks.inner),
        factors.tensor("B", blocks.inner, blocks.columns),
    )
    methods, results = {name: make_method(name, blocks, a, o) for name in o.algorithms}, {}
    for name, method in methods.items():
        results[name] = prepared(a, b, method)
        cases[name + ALONE] = partial(
            torch.mm, row_a, column_b, out=a.new_empty(len(row_a), column_b.shape[1])
        )
        cases[name] = results[name]
    if o.benchmark and "summa" in methods:
        cases |= {f"summa {peer}": call for peer, call in dtensor(a, b, blocks).items()}
    measured = in_turn(cases, o.steps, rt.world, warm_up=1, device=rt.device.type)
    M, K, J = o.shape
    flop, what = 2 * M * K * J, f"{M} x {K} x {J} on {grid.rows} x {grid.columns} x {grid.layers}, {o.dtype}"
    console(rt).print(times_table(what, measured, flop, rt.world_size, o.algorithms))
    if o.plot and rt.rank == 0:
        speeds = {name: {rt.world_size: flop / measured[name].median / 1e9} for name in o.algorithms}
        with figure(o.plot) as (axes,):
            throughput_bars(axes, speeds, unit="GFLOP/s", title=what)
    records = []
    for name, method in methods.items():
        apart = factors.apart("C", results[name](), *blocks.place("C"), rt.world, at_most=4)
        formula = float(bytes_by_formula(method, a.element_size())[0])
        records.append(record(rt, name, factors, measured[name], formula, apart))
    return records


def main(rt: Runtime, o: GridOptions) -> bool:
    """Prove equality with numpy, or with --benchmark time and check some rows."""
    o.check(rt.world_size)
    assert o.grid is not None
    if rt.world_size > 1:
        torch.set_num_threads(1)
    grid = make_grid(rt.world, *o.grid, o.layers, rt.timeout)
    return timed(rt, benchmark(rt, o, grid), o.json) if o.benchmark else prove(rt, o, grid)


if __name__ == "__main__":
    run(main, GridOptions)
