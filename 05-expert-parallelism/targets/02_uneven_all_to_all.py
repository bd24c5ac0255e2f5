"""Targets of the uneven all-to-all: its gradient, and a layer of experts spread over ranks against one device.

Every rank draws the rows of all ranks. A target communicates first and compares afterwards, so that no rank waits for
one that has missed it. n ranks  E experts, e of a rank  R rows of a rank, Q of its experts  D width
"""

from typing import Any

import torch
from torch import Tensor

from common.comm import Group, sizes_of
from common.grade.targets import at_most, backpropagate, counted, exactly, holds, same, target

E, D = 7, 3
ROW = 8 * D  # bytes


def draw(rng: torch.Generator, *shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def numbers(rng: torch.Generator, n: int, parts: int) -> Tensor:
    """Return numbers of rows from 0 to 4; uneven, and the last of three or more ranks sends nothing."""
    rows = torch.randint(0, 5, (n, parts), generator=rng)
    if n > 1:
        rows[0, 0], rows[0, 1], rows[1, 0], rows[-1, -1] = 2, 4, 1, 3
    if n > 2:
        rows[-1] = 0
    return rows


def exchanged(x_nRD: list[Tensor], rows_nn: Tensor) -> list[Tensor]:
    """Return the rows that each rank has after an all-to-all of rows_nn[i, j] rows from i to j."""
    pieces = [x.split(rows.tolist()) for x, rows in zip(x_nRD, rows_nn, strict=True)]
    return [torch.cat(received) for received in zip(*pieces, strict=True)]


@target("all_to_all sends the rows", ranks=(1, 2, 3, 4))
def rows_go(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Uneven numbers; a rank sends nothing."""
    rows_nn = numbers(rng, group.size, group.size)
    x_nRD = [draw(rng, int(n), D) for n in rows_nn.sum(1)]
    send, receive = rows_nn[group.rank].tolist(), rows_nn[:, group.rank].tolist()
    got = mine.all_to_all(x_nRD[group.rank].clone(), send, receive, group)
    same("the rows received", got, exchanged(x_nRD, rows_nn)[group.rank])


@target("its backward pass returns the gradients", ranks=(1, 2, 3, 4))
def gradients_return(mine: Any, group: Group, rng: torch.Generator) -> None:
    """The gradient of a row is that of its copy on another rank."""
    rows_nn = numbers(rng, group.size, group.size)
    dy_nQD = [draw(rng, int(n), D) for n in rows_nn.sum(0)]
    x = draw(rng, int(rows_nn.sum(1)[group.rank]), D).requires_grad_()  # last: other ranks draw other lengths
    send, receive = rows_nn[group.rank].tolist(), rows_nn[:, group.rank].tolist()
    y = mine.all_to_all(x, send, receive, group)
    backpropagate("the result of all_to_all", y, dy_nQD[group.rank].clone())
    mistakes = {"the gradient of the rows received: it was not sent back": dy_nQD[group.rank]}
    same("the gradient of x", x.grad, exchanged(dy_nQD, rows_nn.T)[group.rank], mistakes)


def compute(rows_RD: Tensor, counts_E: Tensor, w_EDD: Tensor) -> Tensor:
    """Return the results of experts tanh(x W) for sorted rows."""
    pieces = zip(rows_RD.split(counts_E.tolist()), w_EDD, strict=True)
    return torch.cat([torch.tanh(x @ w) for x, w in pieces])


class Layer:
    """Random rows of all ranks and experts on one device; and what this rank gives to the answer and gets."""

    def __init__(self, group: Group, rng: torch.Generator) -> None:
        self.group, self.sizes = group, sizes_of(E, group.size)
        self.counts_nE = numbers(rng, group.size, E)
        self.rows_nn = torch.stack([c.sum(1) for c in self.counts_nE.split(self.sizes, 1)], 1)
        self.x_nRD = [draw(rng, int(n), D).requires_grad_() for n in self.rows_nn.sum(1)]
        self.dy_nRD = [draw(rng, len(x), D) for x in self.x_nRD]
        self.w_EDD = draw(rng, E, D, D).requires_grad_()
        self.x = self.x_nRD[group.rank].detach().clone().requires_grad_()
        self.w = self.w_EDD.detach().split(self.sizes)[group.rank].clone().requires_grad_()
        self.calls: list[tuple[Tensor, Tensor]] = []

    def one_device(self) -> list[Tensor]:
        """Return the results of every rank."""
        ranks = zip(self.x_nRD, self.counts_nE, strict=True)
        return [compute(x, counts_E, self.w_EDD) for x, counts_E in ranks]

    def experts(self, rows_QD: Tensor, counts_e: Tensor) -> Tensor:
        """Apply this rank's experts; if the counts are wrong, return the rows, and let `check_call` say so."""
        self.calls.append((rows_QD.detach(), counts_e))
        right = len(counts_e) == len(self.w) and int(counts_e.sum()) == len(rows_QD)
        return compute(rows_QD, counts_e, self.w) if right else rows_QD * self.w.sum()

    def received(self) -> list[tuple[Tensor, Tensor]]:
        """Return for each rank the rows that it receives, sorted by sender, and the order that sorts them by expert."""
        rows_nQD = exchanged([x.detach() for x in self.x_nRD], self.rows_nn)
        found = []
        for x, counts_ne in zip(rows_nQD, self.counts_nE.split(self.sizes, 1), strict=True):
            expert_Q = torch.arange(counts_ne.shape[1]).repeat(len(counts_ne))
            found.append((x, expert_Q.repeat_interleave(counts_ne.flatten()).argsort(stable=True)))
        return found

    def check_call(self) -> None:
        """Raise Wrong unless the experts were called once, with the rows of all ranks sorted by expert."""
        holds(len(self.calls) == 1, f"experts was called {len(self.calls)} times; call it once")
        (rows_QD, counts_e), (received_QD, order_Q) = self.calls[0], self.received()[self.group.rank]
        same("counts_e", counts_e, self.counts_nE.sum(0).split(self.sizes)[self.group.rank])

        def any_order(x_QD: Tensor) -> Tensor:
            """Sort the rows of each expert by their first number."""
            return torch.cat([x[x[:, 0].argsort()] for x in x_QD.split(counts_e.tolist())])

        holds(len(rows_QD) == len(order_Q), f"rows_QD has {len(rows_QD)} rows, {len(order_Q)} are needed")
        mistakes = {"sorted by sender, as the rows arrived, and not by expert": any_order(received_QD)}
        same("rows_QD", any_order(rows_QD), any_order(received_QD[order_Q]), mistakes)

    def not_sorted_back(self) -> Tensor:
        """Return this rank's results if ranks send back results that are sorted by expert."""
        ranks = zip(
            self.received(), self.counts_nE.split(self.sizes, 1), self.w_EDD.split(self.sizes), strict=True
        )
        y_nQD = [compute(x[order_Q], counts.sum(0), w.detach()) for (x, order_Q), counts, w in ranks]
        return exchanged(y_nQD, self.rows_nn.T)[self.group.rank]


@target("rows get the results of their experts", ranks=(1, 2, 3, 4))
def through(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Seven experts, uneven on the ranks."""
    layer = Layer(group, rng)
    counts_E = layer.counts_nE[group.rank].clone()
    y = mine.through_experts(layer.x, counts_E, layer.experts, group)
    layer.check_call()
    mistakes = {"in the order in which the experts computed them, not sorted back": layer.not_sorted_back()}
    same("the result of through_experts", y, layer.one_device()[group.rank], mistakes)


@target("gradients of rows and experts are those of one device", ranks=(1, 2, 3, 4))
def layer_gradients(mine: Any, group: Group, rng: torch.Generator) -> None:
    """An expert's gradient is complete on its rank."""
    layer = Layer(group, rng)
    y = mine.through_experts(layer.x, layer.counts_nE[group.rank].clone(), layer.experts, group)
    backpropagate("the result of through_experts", y, layer.dy_nRD[group.rank])
    torch.cat(layer.one_device()).backward(torch.cat(layer.dy_nRD))
    same("the gradient of rows_RD", layer.x.grad, layer.x_nRD[group.rank].grad)
    same("the gradient of this rank's experts", layer.w.grad, layer.w_EDD.grad.split(layer.sizes)[group.rank])


@target("bytes of the rows that other ranks compute, and of counts", ranks=(1, 2, 3, 4))
def what_is_sent(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Forward: rows, results, counts; backward: the gradients of both."""
    layer = Layer(group, rng)
    others = [r for r in range(group.size) if r != group.rank]
    rows = int(layer.rows_nn[group.rank, others].sum() + layer.rows_nn[others, group.rank].sum())
    with counted("all_to_all") as forward:
        y = mine.through_experts(layer.x, layer.counts_nE[group.rank].clone(), layer.experts, group)
    with counted("all_to_all") as backward:
        backpropagate("the result of through_experts", y, layer.dy_nRD[group.rank])
    counts = 8 * (E - layer.sizes[group.rank])
    at_most("bytes that the forward pass sends", forward.bytes(), rows * ROW + counts)
    exactly("bytes that the backward pass sends", backward.bytes(), rows * ROW)
