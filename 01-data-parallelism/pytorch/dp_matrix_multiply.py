"""C = A B over ranks: three ways to split the product, and the messages of each, forward and backward.

    C[i, j]  =  sum over k of A[i, k] B[k, j]       split by rows i, by columns j, or by the inner k

               A_MK       B_KJ       C_MJ               forward                   backward
    rows       0 0        * *        0 0    S(0)        nothing                   dB: all-reduce
               1 1        * *        1 1
    columns    * *        0 1        0 1    S(1)        nothing                   dA: all-reduce
               * *        0 1        0 1
    inner      0 1        0 0        0 0    P to S(0)   C: reduce-scatter         dC: all-gather
               0 1        1 1        1 1
    gathered   as rows, but B begins as S(0)            B: all-gather             dB: reduce-scatter

A digit is the rank that holds a part; * is on all ranks. `rows` is data parallelism without a model: A is the
batch, B the weights, dB the gradient. `gathered` is ZeRO-3. `columns` and `inner` are the two halves of
tensor parallelism.

Cost, for |X| bytes of X on n ranks: per rank an all-reduce sends 2(n-1)/n |X|, the other collectives (n-1)/n
|X|. Of a sharded matrix a rank stores 1/n, of a replicated one all. In addition `gathered` stores |B|, and
`inner` |C|, or 2/P |C| in P panels.

    python dp_matrix_multiply.py --nproc 4                   torchrun --nproc_per_node=4 dp_matrix_multiply.py
    mpirun -np 4 python dp_matrix_multiply.py --gather
    mpirun -np 2 --bind-to core python dp_matrix_multiply.py --benchmark --shape 4096 4096 4096 --dtype float32
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group, Pending, collectives, sizes_of
from common.comm.ledger import Ledger, show_bytes
from common.launch.runtime import Runtime
from common.lesson.equality import difference
from common.lesson.matrices import ALONE, proved, record, timed, times_table
from common.lesson.measure import BenchmarkRecord, Measured, in_turn
from common.lesson.runner import DTYPES, console, run
from common.utils.visualizer import figure, throughput_bars

from dp_matrices import SPLITS, Factors, MatrixOptions
from dp_matrix_peers import PEERS


def multiply(split: str, a: Tensor, b: Tensor, group: Group) -> Tensor:
    """Return this rank's shard of C, differentiable. SPLITS gives the layout of operands and gradients."""
    if split == "rows":
        return a @ collectives.copy(b, group)
    if split == "columns":
        return collectives.copy(a, group) @ b
    if split == "inner":
        return collectives.reduce_scatter(a @ b, group, 0)
    return a @ collectives.gather(b, group, 0, "partial", sizes_of(a.shape[1], group.size))


def prepared(split: str, a: Tensor, b: Tensor, group: Group, panels: int = 1) -> Callable[[], Tensor]:
    """Return the forward pass of `multiply` as a function whose calls all write into the same result.

    A newly allocated block of 64 MiB costs 16384 page faults, which take longer than sending the block.
    """
    if split == "inner":
        return InPanels(a, b, group, panels)
    c = a.new_empty(a.shape[0], b.shape[1])
    if split != "gathered":
        return partial(torch.mm, a, b, out=c)
    sizes = sizes_of(a.shape[1], group.size)
    whole_KJ = b.new_empty(a.shape[1], b.shape[1]) if len(set(sizes)) == 1 else None

    def gather_and_multiply() -> Tensor:
        if whole_KJ is None:  # unequal shards are padded, in buffers of their own
            return torch.mm(a, comm.all_gather(b, group, 0, sizes), out=c)
        comm.all_gather_into(whole_KJ, b, group)
        return torch.mm(a, whole_KJ, out=c)

    return gather_and_multiply


class InPanels:
    """`inner` in panels: panel p holds some rows of every rank's shard; it is summed while p+1 is computed.

        A_Mk              workspaces, two in turn         C_mJ
        rank 0's rows:  p0 p1        p0 of 0, p0 of 1         p0   sum of all ranks' terms
        rank 1's rows:  p0 p1        p1 of 0, p1 of 1         p1

    A rank with one row fewer than others leaves the last row of its last panel unused.
    """

    def __init__(self, a_Mk: Tensor, b_kJ: Tensor, group: Group, panels: int) -> None:
        self.a, self.b, self.group = a_Mk, b_kJ, group
        self.rows = sizes_of(a_Mk.shape[0], group.size)
        self.offsets = [sum(self.rows[:r]) for r in range(group.size)]
        self.panels = sizes_of(max(self.rows), min(panels, max(self.rows)))
        shape = (group.size * self.panels[0], b_kJ.shape[1])
        self.work = [b_kJ.new_zeros(shape) for _ in self.panels[:2]]
        self.c = b_kJ.new_empty(max(self.rows), b_kJ.shape[1])

    def __call__(self) -> Tensor:
        """Return this rank's rows of C."""
        under_way: list[Pending] = []
        begin, overlap = 0, len(self.panels) > 1
        for p, length in enumerate(self.panels):
            if p > 1:
                under_way[p - 2].wait()  # its message reads the workspace that is filled next
            work = self.work[p % 2][: self.group.size * length]
            for rows, offset, terms in zip(self.rows, self.offsets, work.split(length), strict=True):
                mine = self.a[offset + begin : offset + min(begin + length, rows)]
                torch.mm(mine, self.b, out=terms[: len(mine)])
            c_mJ = self.c[begin : begin + length]
            under_way.append(comm.reduce_scatter_into(c_mJ, work, self.group, async_op=overlap))
            begin += length
        for pending in under_way[-2:]:
            pending.wait()
        return self.c[: self.rows[self.group.rank]]


def gather_on_rank_0(c: Tensor, dim: int, sizes: list[int], group: Group) -> Tensor | None:
    """Return the shards of C joined along `dim` on rank 0, None elsewhere. All ranks but 0 send."""
    if group.rank > 0:
        comm.send(c, group, 0)
        return None
    pieces = [c]
    for r, size in enumerate(sizes[1:], 1):
        pieces.append(c.new_empty((size, c.shape[1]) if dim == 0 else (c.shape[0], size)))
        comm.recv(pieces[r], group, r)
    return torch.cat(pieces, dim)


def bytes_by_formula(split: str, o: MatrixOptions, n: int) -> tuple[Fraction, Fraction]:
    """Return the bytes a rank sends (forward, backward). Uneven shards are padded to the longest."""
    (M, K, J), item = o.shape, DTYPES[o.dtype].itemsize
    if split in ("rows", "columns"):
        return Fraction(0), Fraction(2 * (n - 1) * (K * J if split == "rows" else M * K) * item, n)
    longest = math.ceil((M if split == "inner" else K) / n)
    return Fraction((n - 1) * longest * J * item), Fraction((n - 1) * longest * J * item)


def prove(rt: Runtime, o: MatrixOptions) -> bool:
    """Check every split forward and backward against numpy, its bytes by the formula; then time it."""
    group, factors = rt.world, Factors(o, rt.world, rt.device)
    sizes = " x ".join(map(str, o.shape))
    title = f"C = A B, {sizes}, on {group.size} rank(s), {o.dtype}: max|x - numpy| / max|numpy|"
    equality = Table(title=title, title_justify="left")
    for column in ("split", "A", "B", "C", "C forward", "C prepared", "dA", "dB", "C on rank 0"):
        equality.add_column(column)
    sent = Table(title="bytes a rank sent, mean", title_justify="left")
    for column in ("split", "forward", "by formula", "backward", "by formula"):
        sent.add_column(column, justify="left" if column == "split" else "right")
    largest, agree = 0.0, True
    for name in o.splits:
        lies, formula = SPLITS[name], bytes_by_formula(name, o, group.size)
        a, b = factors.piece("A", lies.a).requires_grad_(), factors.piece("B", lies.b).requires_grad_()
        with Ledger() as forward:
            c = multiply(name, a, b, group)
        with Ledger() as backward:
            c.backward(factors.piece("dC", lies.c))
        with Ledger() as again:
            c_prepared = prepared(name, a.detach(), b.detach(), group, o.panels)()
        assert a.grad is not None
        assert b.grad is not None
        found = [
            factors.difference("C", c, lies.c),
            factors.difference("C", c_prepared, lies.c),
            factors.difference("dA", a.grad, lies.a),
            factors.difference("dB", b.grad, lies.b),
        ]
        if o.gather:
            found.append(gathered_difference(c.detach(), lies.c, factors))
        largest = max(largest, *found)
        agree &= (forward.bytes(), backward.bytes()) == formula and again.bytes() == formula[0]
        layout = ("R" if dim is None else f"S({dim})" for dim in (lies.a, lies.b, lies.c))
        equality.add_row(name, *layout, *(f"{d:.1e}" for d in found), *([] if o.gather else ["not asked"]))
        counted = (forward.bytes(), formula[0], backward.bytes(), formula[1])
        sent.add_row(name, *(show_bytes(x) for x in counted))
    out = console(rt)
    out.print(equality, sent)
    return proved(rt, benchmark(rt, o), o.json, largest, agree)


def gathered_difference(c: Tensor, dim: int, factors: Factors) -> float:
    """Return the difference of the result on rank 0 from numpy's.

    It is infinite if the bytes differ from the formula, or if other ranks have the result, too.
    """
    group = factors.group
    with Ledger() as ledger:
        whole = gather_on_rank_0(c, dim, sizes_of(factors.shapes["C"][dim], group.size), group)
    right = ledger.bytes() == (group.rank > 0) * c.numel() * c.element_size()
    right &= (whole is not None) == (group.rank == 0)
    worst = 0.0 if right else math.inf
    if whole is not None:
        expected = torch.from_numpy(factors.expected("C", slice(None), slice(None)))
        worst = max(worst, difference(expected, whole.double().cpu()))
    over_ranks = torch.tensor(worst, dtype=torch.float64, device=c.device)
    comm.all_reduce(over_ranks, group, "max")
    return over_ranks.item()


def benchmark(rt: Runtime, o: MatrixOptions) -> list[BenchmarkRecord]:
    """Time in turn each split, its product without messages (the ceiling), libraries, and one rank."""
    group, factors = rt.world, Factors(o, rt.world, rt.device)
    even = all(length % group.size == 0 for length in o.shape)
    cases: dict[str, Callable[[], object]] = {"one rank": lambda: None}
    if rt.rank == 0:
        a_MK, b_KJ = factors.piece("A", None), factors.piece("B", None)
        cases["one rank"] = partial(torch.mm, a_MK, b_KJ, out=a_MK.new_empty(o.shape[0], o.shape[2]))
    results: dict[str, Callable[[], Tensor]] = {}
    for name in o.splits:
        lies = SPLITS[name]
        a, b = factors.piece("A", lies.a), factors.piece("B", lies.b)
        results[name] = prepared(name, a, b, group, o.panels)
        whole_b = factors.piece("B", None) if name == "gathered" else b
        cases[name + ALONE] = partial(torch.mm, a, whole_b, out=a.new_empty(a.shape[0], b.shape[1]))
        cases[name] = results[name]
        for peer, make in PEERS.items():
            if o.benchmark and even and (call := make(name, a, b, rt)) is not None:
                cases[f"{name} {peer}"] = call
    measured = in_turn(cases, o.steps, group, warm_up=1, device=rt.device.type)
    show_times(rt, o, measured)
    differences = {name: factors.difference("C", results[name](), SPLITS[name].c, 4) for name in o.splits}
    return [
        record(
            rt,
            name,
            factors,
            measured[name],
            float(bytes_by_formula(name, o, group.size)[0]),
            differences[name],
        )
        for name in o.splits
    ]


def show_times(rt: Runtime, o: MatrixOptions, measured: dict[str, Measured]) -> None:
    """Print the table of times, and draw the picture of --plot."""
    M, K, J = o.shape
    flop, what = 2 * M * K * J, f"{M} x {K} x {J}, {o.dtype}"
    console(rt).print(times_table(what, measured, flop, rt.world_size, SPLITS))
    if o.plot and rt.rank == 0:
        speeds = {
            name: {rt.world_size: flop / m.median / 1e9}
            for name, m in measured.items()
            if name != "one rank" and not name.endswith(ALONE)
        }
        with figure(o.plot) as (axes,):
            throughput_bars(axes, speeds, unit="GFLOP/s", title=what)


def main(rt: Runtime, o: MatrixOptions) -> bool:
    """Prove every split, or with --benchmark time it and check some rows."""
    o.check()
    if rt.world_size > 1:
        torch.set_num_threads(1)
    return timed(rt, benchmark(rt, o), o.json) if o.benchmark else prove(rt, o)


if __name__ == "__main__":
    run(main, MatrixOptions)
