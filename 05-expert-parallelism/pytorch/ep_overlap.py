"""Hide the journeys: while one part of the tokens travels, the experts compute on another.

    at once     dispatch AB | experts AB | combine AB

    2 pieces    dispatch A  | dispatch B |            |                      each expert's rows in P pieces
    computes                | experts A  | experts B  |
                                         | combine A  | combine B

All pieces leave at once. The first is waited for; from then on the experts have something to do as long as a piece
arrives in the time that they need for one. Back it is the same, by autograd alone, which runs what was recorded last
first: the backward of `arrive` (it posts the gradient's way back) comes before that of the experts on another piece,
and the backward of `depart` (it waits for the gradient) after it.

Cost: the same bytes of rows, P counts an expert instead of one, P times the messages. With c seconds for a journey and
e for the experts, forward and backward take 4 c + 3 e at once, and about 4 c / P + 3 e in pieces, as long as c < e
(the backward's products are two of the forward's). That needs somebody to carry the messages: NCCL's own stream, or a
core for gloo's threads; where ranks have one core each, carrying takes as long as it did. (Hwang et al., "Tutel",
arXiv:2206.03382, section 4.2; DeepSeek-V3's DualPipe hides them behind another micro-batch, arXiv:2412.19437.)

    python ep_overlap.py --nproc 2 --pieces 2        torchrun --nproc_per_node=2 ep_overlap.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python ep_overlap.py --benchmark --dtype float32 --trace traces

R rows  D width  E experts, e of this rank  P pieces  n ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import torch
from ep_moe import ExpertExchange, Lesson, MoEOptions, prove_or_time, refuse, transposed
from ep_training import mixtures
from torch import Tensor, nn

from common import comm
from common.comm import Group, Pending, sizes_of
from common.lesson import run
from common.models.transformer import Transformer
from common.options import Size
from common.runtime import Runtime
from common.training import Version

VERSIONS = ("at-once", "pieces")


@dataclass
class OverlapOptions(MoEOptions):
    """Which versions, and in how many pieces."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""
    pieces: Size = 2
    """P, into which each expert's rows are cut."""


class Journey:
    """An all-to-all under way, and its gradient's way back; sizes are rows to and from each rank."""

    def __init__(self, group: Group, send: list[int], receive: list[int]) -> None:
        self.group, self.send, self.receive = group, send, receive

    def leave(self, x_RD: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Post x; the result is filled when `pending` is done."""
        self.out = x_RD.new_empty(sum(receive), x_RD.shape[1])
        self.pending: Pending = comm.all_to_all_into(
            self.out, x_RD.contiguous(), self.group, send, receive, async_op=True
        )
        return self.out


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.leave(x_RD, journey.send, journey.receive)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.journey.pending.wait()
        return ctx.journey.out, None  # what came here was never sent on: the journey has the gradient


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.pending.wait()
        return x_RD.view_as(x_RD)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        ctx.journey.leave(grads[0], ctx.journey.receive, ctx.journey.send)
        return grads[0], None


def depart(x_RD: Tensor, journey: Journey) -> Tensor:
    """Rows on their way; look at them after `arrive`. Its backward waits for the gradient."""
    return cast(Tensor, _Depart.apply(x_RD, journey))


def arrive(x_RD: Tensor, journey: Journey) -> Tensor:
    """The rows, here. Its backward posts the gradient."""
    return cast(Tensor, _Arrive.apply(x_RD, journey))


class OverlappedExchange(ExpertExchange):
    """Rows to their experts and back, in pieces that travel while others are computed."""

    def __init__(self, whole: ExpertExchange, pieces: int) -> None:
        super().__init__(whole.experts, whole.group, sum(whole.sizes))
        self.pieces = pieces

    def __call__(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """rows_RD sorted by expert, counts_E of them for each; their results in the same order."""
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
            out.append((depart(piece_RD, journey), journey))
        for p, (x_RD, journey) in enumerate(out):
            counts_ne = arriving_neP[..., p]
            x_RD = transposed(arrive(x_RD, journey), counts_ne)
            y_RD = transposed(self.experts(x_RD, counts_ne.sum(0)), counts_ne.T)
            home = Journey(group, journey.receive, journey.send)
            back.append((depart(y_RD, home), home))
        return transposed(torch.cat([arrive(y_RD, journey) for y_RD, journey in back]), counts_EP.T)


class OverlapLesson(Lesson):
    """At once and in pieces, with their bytes by formula."""

    def make_version(self, name: str, model: nn.Module, rt: Runtime, o: MoEOptions) -> Version:
        """The model with its experts over all ranks, in this way."""
        assert isinstance(model, Transformer)
        assert isinstance(o, OverlapOptions)
        version = super().make_version(name, model, rt, o)
        if name == "pieces":
            self.exchanges[name] = [OverlappedExchange(whole, o.pieces) for whole in self.exchanges[name]]
            for moe, exchange in zip(mixtures(model), self.exchanges[name], strict=True):
                moe.compute = exchange
        return version

    def steps_bytes(self, name: str, model: nn.Module, group: Group, o: MoEOptions) -> list[Fraction]:
        """As at once, but P counts an expert."""
        assert isinstance(o, OverlapOptions)
        c, others = o.model_config(), o.model_config().experts
        others -= sizes_of(c.experts, group.size)[group.rank]
        more = o.micro_batches * c.layers * 8 * others * (o.pieces - 1) if name == "pieces" else 0
        return [sent + more for sent in super().steps_bytes(name, model, group, o)]


def main(rt: Runtime, o: OverlapOptions) -> bool:
    """Prove both, or with --benchmark time them: the column "blocked" is what is not hidden."""
    refuse(rt, o, VERSIONS)
    return prove_or_time(rt, o, OverlapLesson())


if __name__ == "__main__":
    run(main, OverlapOptions)
