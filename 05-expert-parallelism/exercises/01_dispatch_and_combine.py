"""Dispatch and combine: rows sorted by expert, and results back at their tokens.

A router has chosen K of E experts for each of T tokens. A row is one token at one of its experts, so there are
R = T K rows. Dispatch sorts the rows by expert, so that each expert's rows lie together and form one matrix product;
combine puts the results back, weighs them and adds them per token:

    y_t = sum over k of  weights_TK[t, k] * expert(x_t),    the expert being experts_TK[t, k]

    tokens   experts_TK   rows_RD, sorted by expert     counts_E   row_TK
    t0       1 2          0: t1 of expert 0             2          2 3     t0's rows are 2 and 3
    t1       0 2          1: t2 of expert 0             1          0 4     t1's rows are 0 and 4
    t2       2 0          2: t0 of expert 1             3          5 1     t2's rows are 5 and 1
                          3: t0 of expert 2
                          4: t1 of expert 2
                          5: t2 of expert 2

Within an expert the rows are in the order of the tokens. No token chooses an expert twice; an expert may have no
token, and then its count is 0. Both functions are differentiable by autograd: a token receives the sum of the
gradients of its K rows. This exercise runs on one device, without communication.

Targets: counts, order and positions; y and the gradients of x, of the weights and of every expert equal those of a
loop over all experts; memory at once (besides inputs) of at most 2 R D numbers in dispatch and 3 R D in combine. A
one-hot matrix of R times T numbers is too large. docs/05-expert-parallelism.md, "Sorting tokens by expert".

T tokens  K experts per token  E experts  R = T K rows  D width
"""

import torch
from torch import Tensor


def dispatch(x_TD: Tensor, experts_TK: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows_RD, counts_E, row_TK): the rows sorted by expert, rows per expert, and the row of each choice.

    experts_TK, counts_E and row_TK are int64.
    """
    raise NotImplementedError(
        "flatten experts_TK to R choices and sort them by expert (argsort with stable=True); "
        "then find out which token choice number i belongs to"
    )


def combine(y_RD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return y_TD: for each token the weighted sum of its K results, which are rows row_TK of y_RD."""
    raise NotImplementedError("pick the K results of each token by row_TK, as a tensor of T, K and D")
