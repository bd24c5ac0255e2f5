"""Cannon's product on a square grid: no broadcast, every rank passes its blocks to its neighbours.

    C(r, c)  =  sum over s of  A(r, k) B(k, c)      k = r + c + s  mod q        s = 0 .. q-1, blocks on a q x q grid

    before            skewed: A r places left,        a step later: A one left, B one up
                      B c places up
    A00 A01 A02       A00 A01 A02                     A01 A02 A00
    A10 A11 A12       A11 A12 A10                     A12 A10 A11
    A20 A21 A22       A22 A20 A21                     A20 A21 A22

At every step a rank holds the blocks of A and B with one k, and over q steps it sees every k once. The
backward pass shifts in the same direction: the partial sums of dA travel with the blocks of A, those of dB
with the blocks of B, and both are complete after the last step.

Cost: forward, a rank sends q-1 blocks of A and of B, one more of A to skew it unless the rank is in row 0,
and one more of B unless it is in column 0. Memory: two extra blocks of A and of B, for any q, and in the
backward pass two of dA and of dB. (L. E. Cannon, PhD thesis, Montana State University, 1969.)
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from torch import Tensor

from common import comm
from common.comm import Group, Pending
from common.errors import UsageError
from common.lesson.matrices import cut

from tp_grid import Blocks


class Cannon:
    """Cannon's product of blocks that are distributed as `Blocks` describes, with buffers allocated once.

    Raises UsageError where the grid is not square.
    """

    def __init__(self, blocks: Blocks, like: Tensor) -> None:
        grid = blocks.grid
        if grid.rows != grid.columns:
            q = max(grid.rows, grid.columns)
            raise UsageError(
                f"--algorithms cannon needs a square grid, {grid.rows} x {grid.columns} is given: --grid {q} {q} "
                f"on {q * q * grid.layers} ranks would fit, and summa takes any grid"
            )
        self.blocks, self.grid, self.q = blocks, grid, grid.rows
        self.m, self.j = (x.stop - x.start for x in (blocks.rows, blocks.columns))
        self.k = [(x.stop - x.start) for x in (cut(blocks.inner, self.q, i) for i in range(self.q))]
        self.work = {
            group: [like.new_empty(self.k[0] * length) for _ in range(2)]
            for group, length in (("row", self.m), ("column", self.j))
        }

    def at(self, step: int) -> int:
        """Return k of the blocks that this rank multiplies in this step."""
        return (self.grid.row.rank + self.grid.column.rank + step) % self.q

    def room(self, line: str, step: int, k: int) -> Tensor:
        """Return the receive buffer for block k of A ("row") or B ("column"); two buffers alternate."""
        shape = (self.m, self.k[k]) if line == "row" else (self.k[k], self.j)
        return self.work[line][step % 2][: shape[0] * shape[1]].view(shape)

    def turns(self, a: Tensor, b: Tensor, use: Callable[[int, Tensor, Tensor], object]) -> None:
        """Call use(k, A(r, k), B(k, c)) for every k, while the blocks of the next step are in flight."""
        r, c = self.grid.column.rank, self.grid.row.rank
        a, skewing_a = move(a, self.room("row", 1, self.at(0)), self.grid.row, r)
        b, skewing_b = move(b, self.room("column", 1, self.at(0)), self.grid.column, c)
        finish(skewing_a + skewing_b)
        for step in range(self.q):
            next_a, next_b, moving = a, b, list[Pending]()
            if step + 1 < self.q:
                k = self.at(step + 1)
                next_a, moving_a = move(a, self.room("row", step, k), self.grid.row, 1)
                next_b, moving_b = move(b, self.room("column", step, k), self.grid.column, 1)
                moving = moving_a + moving_b
            use(self.at(step), a, b)
            finish(moving)
            a, b = next_a, next_b

    def multiply(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        """Write this rank's block of A B into c."""
        self.turns(a, b, lambda k, a, b: c.addmm_(a, b, beta=int(k != self.at(0))))

    def gradients(self, a: Tensor, b: Tensor, dc: Tensor, da: Tensor, db: Tensor) -> None:
        """Write this rank's blocks of dA = dC B^T and dB = A^T dC into da and db."""
        r, c, first = self.grid.column.rank, self.grid.row.rank, self.at(0)
        sum_a, sum_b = dc.new_zeros(self.m, self.k[first]), dc.new_zeros(self.k[first], self.j)

        def add(k: int, a: Tensor, b: Tensor) -> None:
            nonlocal sum_a, sum_b
            sum_a.addmm_(dc, b.T)
            sum_b.addmm_(a.T, dc)
            if k == self.at(self.q - 1):  # back to the rank that held the block before skewing
                left, up, k_a, k_b = 1 - r, 1 - c, c, r
            else:  # onward, with the block
                left, up, k_a, k_b = 1, 1, (k + 1) % self.q, (k + 1) % self.q
            sum_a, moving_a = move(sum_a, dc.new_empty(self.m, self.k[k_a]), self.grid.row, left, tag=1)
            sum_b, moving_b = move(sum_b, dc.new_empty(self.k[k_b], self.j), self.grid.column, up, tag=1)
            finish(moving_a + moving_b)

        self.turns(a, b, add)
        da.copy_(sum_a)
        db.copy_(sum_b)

    def bytes(self, item: int) -> tuple[Fraction, Fraction]:
        """Return the bytes this rank sends (forward, backward), by formula. item: bytes per number."""
        r, c, q, K = self.grid.column.rank, self.grid.row.rank, self.q, sum(self.k)
        last = self.k[self.at(q - 1)]  # width of the last block, the only one that this rank does not pass on
        a, b = self.m * (K - last), self.j * (K - last)
        forward = a + b + self.m * self.k[c] * (r > 0) + self.j * self.k[r] * (c > 0)
        home = last * (self.m * ((r - 1) % q > 0) + self.j * ((c - 1) % q > 0))
        return Fraction(forward * item), Fraction((forward + a + b + home) * item)


def move(x: Tensor, room: Tensor, group: Group, by: int, tag: int = 0) -> tuple[Tensor, list[Pending]]:
    """Start a ring shift: send x to the rank `by` places back, receive into `room` from `by` places ahead.

    Return (the tensor that will hold the result, the pending exchange). Where `by` is a multiple of the
    ring's size nothing is sent, and the result is x. Empty blocks do not travel.
    """
    if by % group.size == 0:
        return x, []
    back, ahead = (group.rank - by) % group.size, (group.rank + by) % group.size
    return room, [comm.exchange(x, room, group, back, ahead, tag, async_op=True)]


def finish(moving: list[Pending]) -> None:
    """Wait until all of these exchanges are complete."""
    for pending in moving:
        pending.wait()
