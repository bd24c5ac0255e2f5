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

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common import comm
from common.comm import Group, Pending, collectives, sizes_of
from common.launch.command_line import check_names
from common.launch.runtime import Runtime
from common.lesson.matrices import Products, Way, run_products
from common.lesson.runner import run

from dp_costs import product_bytes
from dp_matrices import SPLITS, MatrixOptions, gathered_difference
from dp_matrix_peers import libraries


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


def products(rt: Runtime, o: MatrixOptions) -> Products:
    """Return the chosen splits on these ranks."""
    ways = {}
    for name in o.splits:
        split = SPLITS[name]
        places = split.places(o.shape, rt.world)
        ways[name] = Way(
            places,
            places["A"][1],
            partial(multiply, name, group=rt.world),
            partial(prepared, name, group=rt.world, panels=o.panels),
            product_bytes(name, o, rt.world_size),
            partial(libraries, name, rt=rt, shape=o.shape),
            split.layout(),
            {"C on rank 0": partial(gathered_difference, gather_on_rank_0, o, rt, split.c)}
            if o.gather
            else {},
        )
    return Products("dp", ("split", "A", "B", "C"), f"{rt.world_size} rank(s)", ways)


def main(rt: Runtime, o: MatrixOptions) -> bool:
    """Prove every split, or with --benchmark time it and check some rows."""
    check_names("splits", o.splits, SPLITS)
    return run_products(rt, o, products(rt, o))


if __name__ == "__main__":
    run(main, MatrixOptions)
