"""Uneven all-to-all: rows to the ranks of their experts, and results back.

Every rank holds some of E experts, in order: `comm.sizes_of(E, group.size)` has the number on each rank; they differ
by at most one. A rank has rows sorted by expert, and counts_E says how many for each. Rows go to the rank of their
expert, and the expert's results return to the rank and the row that they came from. Rank 0 has
experts 0 and 1 here, rank 1 experts 2 and 3; a2 is the row of token a for expert 2; a bar separates ranks, senders or
experts:

              rows by expert   all-to-all, by sender   sorted by expert   experts, and back the same way
    rank 0    a0 b1 | a2 b3    a0 b1 | d0 c1           a0 d0 | b1 c1      results in the order of a0 b1 a2 b3
    rank 1    d0 c1 | c2 d3    a2 b3 | c2 d3           a2 c2 | b3 d3      results in the order of d0 c1 c2 d3

Communicate by `comm.all_to_all(x, group, send, receive)` alone. It sends the first send[0] rows of x to rank 0 of the
group, the next send[1] rows to rank 1, and so on, and returns the rows received, in the order of their senders:
receive[i] rows of rank i. Both are lists of group.size integers, which may be 0; rows of this rank for itself are among
them. x may be of any type, and have one dimension (its numbers are the rows) or more. Autograd does not know the call:
first write `all_to_all`, the same with a gradient, as a torch.autograd.Function. A rank does not know how many rows it
will receive: in `through_experts` the ranks first tell one another. `group.rank` is this rank's place in the group.

Targets: values and gradients equal those of one device that holds all rows and experts, for 1 to 4 ranks and uneven
numbers, also where a rank sends nothing. Forward, a rank sends exactly the rows for other ranks and the results
for them, and at most 8 bytes per expert of another rank for the counts; backward, exactly as many rows as forward.

E experts, e of this rank  R rows of this rank  Q rows of this rank's experts, from all ranks  D width
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common import comm
from common.comm import Group


def all_to_all(x_RD: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Return the rows received, as comm.all_to_all does, with a gradient."""
    raise NotImplementedError(
        "in the forward pass row i went to some rank; where does its gradient come from in the backward pass, "
        "and how many rows does each rank then send?"
    )


def through_experts(
    rows_RD: Tensor, counts_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor], group: Group
) -> Tensor:
    """Return the experts' results for rows_RD, which are sorted by expert, in the same order.

    counts_E: this rank's rows for each expert, int64. Call experts(rows_QD, counts_e) once, with the rows of all
    ranks sorted by expert, and the rows of each of this rank's e experts; it returns results in the order of rows_QD.
    """
    raise NotImplementedError(
        "tell every rank how many rows you have for each of its experts: an all-to-all of counts_E"
    )
