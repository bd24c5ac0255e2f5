"""Overlap of messages with products: all-gather before a layer and reduce-scatter after it, in pieces.

    whole     |------- gather -------|------------ multiply ------------|
    pieces    |- g0 -|- g1 -|- g2 -|
                     |--- m0 ---|--- m1 ---|--- m2 ---|                    each is multiplied as it arrives

With Megatron's sequence parallelism every region begins with an all-gather and ends with a reduce-scatter of
B S D numbers. The first product needs the gathered input, and the reduce-scatter needs the last product, so
as wholes they cannot overlap. But one row of the product needs only one row of the input. So the rank cuts
its slice of the sequence into q pieces, and piece j + 1 travels while piece j is multiplied; at the end of
the region piece j travels while piece j + 1 is multiplied (Wang et al., "Overlap communication with dependent
computation via decomposition", ASPLOS 2023). The two are each other's adjoints, so the backward pass overlaps
as well.

    t(q) = max(t_c, t_m) + min(t_c, t_m) / q + q o        best at q = sqrt(min(t_c, t_m) / o)

t_c is the time of the product, t_m that of the message, o the overhead per piece. The gain is at most a factor
of 2, at t_c = t_m.

Cost: the bytes of the plain version. Memory: one more piece, in flight.

    python tp_overlap.py --nproc 4     torchrun --nproc_per_node=4 tp_overlap.py     mpirun -np 4 python tp_overlap.py
    mpirun -np 2 --bind-to core python tp_overlap.py --benchmark --dtype float32      # t(q), by formula and measured
    mpirun -np 2 --bind-to core python tp_overlap.py --benchmark --trace traces       # with a trace
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group, Pending, sizes_of
from common.comm.placement import sum_gradients
from common.errors import UsageError
from common.launch.command_line import Size, Within
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import FeedForward

from tp_costs import megatron_bytes
from tp_megatron import MegatronOptions, Region, check_split, columns, leaving, split_mlp, tensor_parallel
from tp_overlap_times import sweep
from tp_training import lesson, tp_group

VERSIONS = ("whole", "pieces")
LINK = 0.1  # GB/s of the link that the benchmark simulates


class Pieces:
    """A rank's slice of the sequence, cut into pieces, and a simulated link that carries them.

    count: number of pieces. speed: no piece of `send` completes sooner than at so many bytes per second.
    """

    def __init__(self, group: Group, count: int, speed: float = math.inf) -> None:
        self.group, self.count, self.speed, self.free = group, count, speed, 0.0

    def places(self, length: int) -> list[tuple[int, int]]:
        """Return [lo, hi) of each piece; there are at most as many pieces as positions."""
        ends = list(itertools.accumulate(sizes_of(length, min(self.count, length)), initial=0))
        return list(itertools.pairwise(ends))

    def send(self, call: Callable[..., Pending], out: Tensor, x: Tensor) -> Callable[[], None]:
        """Start call(out, x), a gather or a scatter; return a function that waits for it."""
        whole = max(out.numel(), x.numel()) * x.element_size()
        pending = call(out, x, self.group, async_op=True)
        start = max(self.free, time.perf_counter())
        self.free = due = start + whole * (self.group.size - 1) / self.group.size / self.speed

        def wait() -> None:
            pending.wait()
            time.sleep(max(0.0, due - time.perf_counter()))

        return wait


def arriving(x_BsD: Tensor, pieces: Pieces) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (lo, hi, all ranks' positions [lo, hi), [n, B, hi - lo, D]); meanwhile the next piece travels."""

    def start(lo: int, hi: int) -> tuple[Callable[[], None], Tensor]:
        piece = x_BsD[:, lo:hi].contiguous()
        out = piece.new_empty(pieces.group.size, *piece.shape)
        return pieces.send(comm.all_gather_into, out, piece), out

    places = pieces.places(x_BsD.shape[1])
    wait, piece = start(*places[0])
    for j, (lo, hi) in enumerate(places):
        following = start(*places[j + 1]) if j + 1 < len(places) else None
        wait()
        yield lo, hi, piece
        wait, piece = following or (wait, piece)


def gather_multiply(x_BsD: Tensor, matrix_DF: Tensor, pieces: Pieces) -> tuple[Tensor, list[Tensor]]:
    """Return (gather(x) matrix for the whole sequence, the gathered pieces [n, B, piece, D]): S(1) to R.

    Piece j + 1 travels while piece j is multiplied. Sends (n-1)/n of the gathered x.
    """
    y_BnsF = x_BsD.new_empty(x_BsD.shape[0], pieces.group.size, x_BsD.shape[1], matrix_DF.shape[1])
    gathered: list[Tensor] = []
    for lo, hi, piece in arriving(x_BsD, pieces):
        y_BnsF[:, :, lo:hi] = (piece @ matrix_DF).transpose(0, 1)
        gathered.append(piece)
    return y_BnsF.flatten(1, 2), gathered


def multiply_scatter(x_BSf: Tensor, matrix_fD: Tensor, pieces: Pieces) -> Tensor:
    """Return this rank's slice of the sum over ranks of x matrix: P to S(1).

    Piece j travels while piece j + 1 is multiplied. Sends (n-1)/n of the product.
    """
    n = pieces.group.size
    x_Bnsf = x_BSf.unflatten(1, (n, -1))
    y_BsD = x_BSf.new_empty(x_BSf.shape[0], x_Bnsf.shape[2], matrix_fD.shape[1])
    under_way: list[tuple[Callable[[], None], Tensor]] = []
    places = pieces.places(x_Bnsf.shape[2])
    for lo, hi in places:
        parts = x_Bnsf[:, :, lo:hi].transpose(0, 1) @ matrix_fD
        out = parts.new_empty(parts.shape[1:])
        under_way.append((pieces.send(comm.reduce_scatter_into, out, parts), out))
    for (wait, out), (lo, hi) in zip(under_way, places, strict=True):
        wait()
        y_BsD[:, lo:hi] = out
    return y_BsD


def _weight_gradient(whole_BSf: Tensor, in_pieces: Sequence[Tensor], pieces: Pieces) -> Tensor:
    """Return the product whole^T gathered, summed over the tokens, [f, D]."""
    whole_Bnsf = whole_BSf.unflatten(1, (pieces.group.size, -1))
    total_fD = whole_BSf.new_zeros(whole_BSf.shape[-1], in_pieces[0].shape[-1])
    for (lo, hi), piece in zip(pieces.places(whole_Bnsf.shape[2]), in_pieces, strict=True):
        rows = whole_Bnsf[:, :, lo:hi].transpose(0, 1).flatten(0, 2)
        total_fD.addmm_(rows.T, piece.flatten(0, 2))
    return total_fD


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BsD: Tensor, weight_fD: Tensor, pieces: Pieces) -> Tensor:
        y_BSf, gathered = gather_multiply(x_BsD, weight_fD.T, pieces)
        ctx.pieces = pieces
        ctx.save_for_backward(weight_fD, *gathered)
        return y_BSf

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        weight_fD, *gathered = ctx.saved_tensors
        dx_BsD = multiply_scatter(grads[0], weight_fD, ctx.pieces)
        return dx_BsD, _weight_gradient(grads[0], gathered, ctx.pieces), None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSf: Tensor, weight_Df: Tensor, pieces: Pieces) -> Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(x_BSf, weight_Df)
        return multiply_scatter(x_BSf, weight_Df.T, pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        x_BSf, weight_Df = ctx.saved_tensors
        dx_BSf, gathered = gather_multiply(grads[0], weight_Df, ctx.pieces)
        return dx_BSf, _weight_gradient(x_BSf, gathered, ctx.pieces).T, None


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, multiply: Any, pieces: Pieces
) -> Tensor:
    """Multiply in pieces, by _GatherLinear or _LinearScatter."""
    y: Tensor = multiply.apply(x, weight, pieces)
    return y if bias is None else y + bias


def split_overlapped(mlp: nn.Module, region: Region, pieces: Pieces) -> None:
    """Split an MLP whose products gather the input of the sequence-parallel region, and scatter its output."""
    assert isinstance(mlp, FeedForward)
    up, down = columns(mlp.up_proj, region), leaving(mlp.down_proj, region)
    up.product = partial(product, multiply=_GatherLinear, pieces=pieces)
    down.product, down.leave = partial(product, multiply=_LinearScatter, pieces=pieces), lambda y: y
    mlp.add_module("up_proj", up)
    mlp.add_module("down_proj", down)


@dataclass
class OverlapOptions(MegatronOptions):
    """Model and batch of this lesson."""

    pieces: Size = 2
    """Number of pieces into which a rank cuts its slice of the sequence."""
    link: Annotated[float, Within(1e-6, 1e6)] = LINK
    """Bandwidth in GB/s of the link that --benchmark simulates in its second table."""


def train(job: Job[OverlapOptions]) -> Iterator[Tensor]:
    """Train with sequence parallelism, messages whole or in pieces; yield the loss of each batch."""
    model, group = job.model, job.group
    pieces = Pieces(group, job.options.pieces)
    split = partial(split_overlapped, pieces=pieces) if job.version == "pieces" else split_mlp
    tensor_parallel(model, group, sequence_parallel=True, split=split)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # the same on all ranks
        count = batch.count_targets()
        losses = []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = model.loss(model(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        sum_gradients(model.parameters(), job.mesh)
        optimizer.step()
        yield total(losses)


LESSON = Lesson("tp", dict.fromkeys(VERSIONS, train), megatron_bytes)


def main(rt: Runtime, o: OverlapOptions) -> bool:
    """Prove a Transformer both ways; with --benchmark show t(q) on this machine and on a simulated link."""
    check_split(o.model_config(), rt.world_size)
    if o.model_config().mlp != "gelu":
        raise UsageError(
            f"--model {o.model}: this lesson overlaps MLPs with one first layer; give gpt2-tiny or gpt2-10m"
        )
    if o.sequence % rt.world_size:
        below = o.sequence // rt.world_size * rt.world_size
        raise UsageError(
            f"--sequence {o.sequence} does not divide over {rt.world_size} ranks; {below or rt.world_size} would do"
        )
    if not o.benchmark:
        return lesson(rt, o, LESSON)
    if rt.world_size > 1:
        torch.set_num_threads(1)
    group, right = tp_group(rt), True
    links = {math.inf: "as messages travel here", 1e9 * o.link: f"a link of {o.link:g} GB/s that we pretend"}
    for speed, title in links.items():
        right &= sweep(rt, o, title, gather_multiply, arriving, partial(Pieces, group, speed=speed))
    return right


if __name__ == "__main__":
    run(main, OverlapOptions, versions=VERSIONS)
