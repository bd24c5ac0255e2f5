"""Overlap of all-to-all with expert computation: while one part of the tokens travels, another is computed.

    at once     dispatch AB | experts AB | combine AB

    2 pieces    dispatch A  | dispatch B |            |                      each expert's rows in P pieces
    computes                | experts A  | experts B  |
                                         | combine A  | combine B

All pieces are sent at once, and the rank waits for the first. From then on its experts are busy if a piece
arrives in the time that they need for one. The backward pass overlaps in the same way without further code,
because autograd runs the operations in reverse order: the backward of `Arrive` (it sends the gradient back)
comes before that of the experts on another piece, and the backward of `Depart` (it waits for the gradient)
after it.

Cost: the same bytes of rows, P counts per expert instead of one, P times the messages. With c seconds for an
all-to-all and e for the experts, forward and backward take 4 c + 3 e at once, and about 4 c / P + 3 e in
pieces, as long as c < e (the backward pass has two products for each of the forward pass). The overlap needs
something else to carry the messages: NCCL's own stream, or a core for gloo's threads; if ranks have one core
each, messages cost as much time as before. (Hwang et al., "Tutel", arXiv:2206.03382, section 4.2;
DeepSeek-V3's DualPipe overlaps the messages with another micro-batch, arXiv:2412.19437.)

    python ep_overlap.py --nproc 2 --pieces 2        torchrun --nproc_per_node=2 ep_overlap.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python ep_overlap.py --benchmark --dtype float32 --trace traces

R rows  D width  E experts, e of this rank  P pieces  n ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group, Pending
from common.comm.placement import sum_gradients
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.comparison import prove, time_in_turn
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

import ep_moe
from ep_costs import BytesInPieces, RoutedBytes
from ep_moe import ExpertExchange, expert_parallel, transposed, with_capacity
from ep_training import MoEOptions, check, mixtures

VERSIONS = ("at-once", "pieces")


@dataclass
class OverlapOptions(MoEOptions):
    """Options: the number of pieces."""

    pieces: Size = 2
    """Number of pieces, P, into which each expert's rows are cut."""


class Journey:
    """An all-to-all in flight, and the reverse one of its gradient; sizes are rows to and from each rank."""

    def __init__(self, group: Group, send: list[int], receive: list[int]) -> None:
        self.group, self.send, self.receive = group, send, receive

    def leave(self, x_RD: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Start to send x; return the receive buffer, which is filled when `pending` is done."""
        self.out = x_RD.new_empty(sum(receive), x_RD.shape[1])
        self.pending: Pending = comm.all_to_all_into(
            self.out, x_RD.contiguous(), self.group, send, receive, async_op=True
        )
        return self.out


class Depart(torch.autograd.Function):
    """Start to send rows; use the result only after `Arrive`. The backward pass waits for the gradient."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.leave(x_RD, journey.send, journey.receive)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.journey.pending.wait()
        return ctx.journey.out, None  # `grads` is ignored: the gradient arrived in the journey's buffer


class Arrive(torch.autograd.Function):
    """Wait for the rows and return them. The backward pass starts to send the gradient."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.pending.wait()
        return x_RD.view_as(x_RD)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.journey.leave(grads[0], ctx.journey.receive, ctx.journey.send)
        return grads[0], None


class OverlappedExchange(ExpertExchange):
    """Exchange of rows with their experts in pieces, which travel while other pieces are computed."""

    def __init__(self, whole: ExpertExchange, pieces: int) -> None:
        super().__init__(whole.experts, whole.group, sum(whole.sizes))
        self.pieces = pieces

    def __call__(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply the experts to rows_RD, sorted by expert, counts_E for each; return results in that order."""
        group, P, e = self.group, self.pieces, self.sizes[self.group.rank]
        ends_EP = counts_E[:, None] * torch.arange(P + 1, device=counts_E.device) // P
        counts_EP = ends_EP.diff()
        arriving_neP = comm.all_to_all(counts_EP, group, self.sizes, [e] * group.size).view(group.size, e, P)
        to_nP = torch.stack([counts.sum(0) for counts in counts_EP.split(self.sizes)])
        from_nP = arriving_neP.sum(1)
        self.note(to_nP.sum(1).tolist(), from_nP.sum(1).tolist())
        pieces = transposed(rows_RD, counts_EP).split(counts_EP.sum(0).tolist())
        out, back = [], []
        for piece_RD, send, receive in zip(pieces, to_nP.T.tolist(), from_nP.T.tolist(), strict=True):
            journey = Journey(group, send, receive)
            out.append((Depart.apply(piece_RD, journey), journey))
        for p, (x_RD, journey) in enumerate(out):
            counts_ne = arriving_neP[..., p]
            x_RD = transposed(Arrive.apply(x_RD, journey), counts_ne)
            y_RD = transposed(self.experts(x_RD, counts_ne.sum(0)), counts_ne.T)
            home = Journey(group, journey.receive, journey.send)
            back.append((Depart.apply(y_RD, home), home))
        return transposed(torch.cat([Arrive.apply(y_RD, journey) for y_RD, journey in back]), counts_EP.T)


def train(job: Job[OverlapOptions], sent: RoutedBytes) -> Iterator[Tensor]:
    """Train with the rows sent at once or in pieces; yield the loss of each global batch."""
    model, group = job.model, job.group
    exchanges = expert_parallel(model, group)
    with_capacity(job.version, model, job.options)
    if job.version == "pieces":
        exchanges = [OverlappedExchange(whole, job.options.pieces) for whole in exchanges]
        for moe, exchange in zip(mixtures(model), exchanges, strict=True):
            moe.compute = exchange
    sent.exchanges[job.version] = exchanges
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # samples of this rank
        count = batch.count_targets(group)  # of all ranks: an all-reduce of 8 bytes
        losses = []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        sum_gradients(model.parameters(), job.mesh)  # of dense parameters; an expert's is complete
        optimizer.step()
        yield total(losses, group)


def main(rt: Runtime, o: OverlapOptions) -> bool:
    """Prove both versions, or with --benchmark time them: "blocked" is the time that is not overlapped."""
    check(rt, o, VERSIONS)
    lesson = ep_moe.lesson(dict.fromkeys(VERSIONS, train), BytesInPieces())
    return (time_in_turn if o.benchmark else prove)(rt, o, lesson)


if __name__ == "__main__":
    run(main, OverlapOptions, versions=VERSIONS)
