"""Overlap of messages with products: all-gather before a layer and reduce-scatter after it, in pieces.

    whole     |------- gather -------|------------ multiply ------------|
    pieces    |- g0 -|- g1 -|- g2 -|
                     |--- m0 ---|--- m1 ---|--- m2 ---|                    each is multiplied as it arrives

With Megatron's sequence parallelism every region begins with an all-gather and ends with a reduce-scatter of
B S D numbers. The first product needs the gathered input, and the reduce-scatter needs the last product, so
as wholes they cannot overlap. But one row of the product needs only one row of the input. So the rank cuts
its slice of the sequence into P pieces, and piece j + 1 travels while piece j is multiplied; at the end of
the region piece j travels while piece j + 1 is multiplied (Wang et al., "Overlap communication with dependent
computation via decomposition", ASPLOS 2023). The two are each other's adjoints, so the backward pass overlaps
as well.

    T(P) = max(Tc, Tm) + min(Tc, Tm) / P + P o        best at P* = sqrt(min(Tc, Tm) / o)

Tc is the time of the product, Tm that of the message, o the overhead per piece. The gain is at most a factor
of 2, at Tc = Tm.

Cost: the bytes of the plain version. Memory: one more piece, in flight.

    python tp_overlap.py --nproc 4     torchrun --nproc_per_node=4 tp_overlap.py     mpirun -np 4 python tp_overlap.py
    mpirun -np 2 --bind-to core python tp_overlap.py --benchmark --dtype float32      # T(P), by formula and measured
    mpirun -np 2 --bind-to core python tp_overlap.py --benchmark --trace traces       # with a trace
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import torch
from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group, Pending, sizes_of
from common.comm.placement import sum_gradients
from common.errors import UsageError
from common.launch.command_line import Size, Within
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.equality import TOLERANCE, difference
from common.lesson.job import Job, total
from common.lesson.measure import in_turn
from common.lesson.runner import DTYPES, console, run
from common.models.transformer import Transformer

from tp_costs import megatron_bytes
from tp_megatron import MegatronOptions, check_split, tensor_parallel
from tp_training import lesson, tp_group

VERSIONS = ("whole", "pieces")
LINK = 0.1  # GB/s of the link that the benchmark simulates


class Link:
    """Simulated link: no message of the process group completes sooner than at `speed` bytes per second."""

    def __init__(self, speed: float = math.inf) -> None:
        self.speed, self.free = speed, 0.0

    def send(self, start: Callable[[], Pending], size: float) -> Callable[[], None]:
        """Start a message of which this rank sends `size` bytes; return a function that waits for it."""
        pending = start()
        self.free = due = max(self.free, time.perf_counter()) + size / self.speed

        def wait() -> None:
            pending.wait()
            time.sleep(max(0.0, due - time.perf_counter()))

        return wait


@dataclass(frozen=True)
class Pieces:
    """Number of pieces of a rank's slice of the sequence, and the group and link that carry them."""

    group: Group
    count: int
    link: Link

    def places(self, length: int) -> list[tuple[int, int]]:
        """Return [lo, hi) of each piece; there are at most as many pieces as positions."""
        sizes = sizes_of(length, min(self.count, length))
        return [(sum(sizes[:j]), sum(sizes[: j + 1])) for j in range(len(sizes))]

    def sent(self, x: Tensor) -> float:
        """Return the bytes that this rank sends where x is the whole tensor of a gather or a scatter."""
        return x.numel() * x.element_size() * (self.group.size - 1) / self.group.size


def gather_multiply(x_BsD: Tensor, matrix_DF: Tensor, pieces: Pieces) -> tuple[Tensor, list[Tensor]]:
    """Return (gather(x) matrix for the whole sequence, the gathered pieces [n, B, piece, D]): S(1) to R.

    Piece j + 1 travels while piece j is multiplied. Sends (n-1)/n of the gathered x.
    """
    n, (B, s, _) = pieces.group.size, x_BsD.shape
    y_BnsF = x_BsD.new_empty(B, n, s, matrix_DF.shape[1])
    gathered: list[Tensor] = []
    waits: list[Callable[[], None]] = []

    def start(lo: int, hi: int) -> None:
        piece = x_BsD[:, lo:hi].contiguous()
        out = piece.new_empty(n, *piece.shape)
        call = partial(comm.all_gather_into, out, piece, pieces.group, async_op=True)
        waits.append(pieces.link.send(call, pieces.sent(out)))
        gathered.append(out)

    places = pieces.places(s)
    start(*places[0])
    for j, (lo, hi) in enumerate(places):
        if j + 1 < len(places):
            start(*places[j + 1])
        waits[j]()
        y_BnsF[:, :, lo:hi] = (gathered[j] @ matrix_DF).transpose(0, 1)
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
        call = partial(comm.reduce_scatter_into, out, parts, pieces.group, async_op=True)
        under_way.append((pieces.link.send(call, pieces.sent(parts)), out))
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


class OverlappedUp(nn.Module):
    """First layer of a region: maps x_BsD, a slice of the sequence, to y_BSf."""

    def __init__(self, linear: Any, pieces: Pieces) -> None:
        super().__init__()
        self.weight, self.bias, self.pieces = linear.weight, linear.bias, pieces

    def forward(self, x_BsD: Tensor) -> Tensor:
        y_BSf: Tensor = _GatherLinear.apply(x_BsD, self.weight, self.pieces)
        return y_BSf if self.bias is None else y_BSf + self.bias


class OverlappedDown(nn.Module):
    """Last layer of a region: maps x_BSf to y_BsD, a slice of the sequence."""

    def __init__(self, linear: Any, pieces: Pieces) -> None:
        super().__init__()
        self.weight, self.bias, self.pieces = linear.weight, linear.bias, pieces

    def forward(self, x_BSf: Tensor) -> Tensor:
        y_BsD: Tensor = _LinearScatter.apply(x_BSf, self.weight, self.pieces)
        return y_BsD if self.bias is None else y_BsD + self.bias


def overlap(model: Transformer, pieces: Pieces) -> Transformer:
    """Overlap both ends of every MLP of a sequence-parallel model; attention stays as it is."""
    for layer in model.layers:
        mlp: Any = layer.mlp
        mlp._forward_pre_hooks.clear()  # the region's gather; from now on up_proj gathers
        mlp.up_proj, mlp.down_proj = OverlappedUp(mlp.up_proj, pieces), OverlappedDown(mlp.down_proj, pieces)
    return model


@dataclass
class OverlapOptions(MegatronOptions):
    """Model and batch of this lesson."""

    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""
    pieces: Size = 2
    """Number of pieces into which a rank cuts its slice of the sequence."""
    link: Annotated[float, Within(1e-6, 1e6)] = LINK
    """Bandwidth in GB/s of the link that --benchmark simulates in its second table."""


def train(job: Job[OverlapOptions]) -> Iterator[Tensor]:
    """Train with sequence parallelism, messages whole or in pieces; yield the loss of each batch."""
    model, group = job.model, job.group
    tensor_parallel(model, group, sequence_parallel=True)
    if job.version == "pieces":
        overlap(model, Pieces(group, job.options.pieces, Link()))
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


def step_bytes(name: str, model: nn.Module, group: Group, o: OverlapOptions) -> Fraction:
    """Return the bytes a rank sends in a step, for both versions those of whole messages."""
    return megatron_bytes("sequence-parallel", model, group, o)


LESSON = Lesson("tp", dict.fromkeys(VERSIONS, train), step_bytes)


def predicted(compute: float, message: float, piece: float, count: int) -> float:
    """Return T(P), in the unit of the given times. piece: the overhead per piece, o. count: P."""
    return max(compute, message) + min(compute, message) / count + count * piece


def sweep(rt: Runtime, o: OverlapOptions, speed: float, title: str) -> bool:
    """Show T(P) of an MLP's first layer, forward, by formula and measured; True if 1 and 16 pieces agree."""
    group, tokens, width = tp_group(rt), 2048 // rt.world_size, 1024
    generator = torch.Generator().manual_seed(group.rank)
    x_BsD = torch.randn(1, tokens, width, dtype=DTYPES[o.dtype], generator=generator).to(rt.device)
    matrix_DF = torch.randn(width, 4 * width // group.size, dtype=DTYPES[o.dtype], generator=generator).to(
        rt.device
    )
    whole_BSD = comm.all_gather(x_BsD, group, 1)
    counts = (1, 2, 4, 8, 16)

    def product(count: int) -> None:
        for rows in whole_BSD.chunk(count, 1):
            rows @ matrix_DF

    def messages(count: int) -> None:
        pieces = Pieces(group, count, Link(speed))
        for lo, hi in pieces.places(tokens):
            piece = x_BsD[:, lo:hi].contiguous()
            out = piece.new_empty(group.size, *piece.shape)
            call = partial(comm.all_gather_into, out, piece, group, async_op=True)
            pieces.link.send(call, pieces.sent(out))()

    cases: dict[str, Callable[[], object]] = {}
    for count in counts:
        cases[f"T {count}"] = partial(gather_multiply, x_BsD, matrix_DF, Pieces(group, count, Link(speed)))
    for count in (1, 16):
        cases[f"c {count}"] = partial(product, count)
        cases[f"m {count}"] = partial(messages, count)
    measured = {
        name: 1e3 * m.median for name, m in in_turn(cases, o.steps, group, device=rt.device.type).items()
    }
    compute, message = measured["c 1"], measured["m 1"]
    piece = max(0.0, (measured["c 16"] - compute + measured["m 16"] - message) / 15)
    title += f"\nproduct {compute:.1f} ms, messages {message:.1f} ms, a piece more {piece:.2f} ms"
    table = Table(title=title, title_justify="left")
    for column in ("pieces", "predicted ms", "measured ms", "of one piece"):
        table.add_column(column, justify="right")
    for count in counts:
        by_formula, found = predicted(compute, message, piece, count), measured[f"T {count}"]
        ratio = f"{found / measured['T 1']:.2f}"
        table.add_row(str(count), f"{by_formula:.1f}", f"{found:.1f}", ratio)
    best = math.sqrt(min(compute, message) / piece) if piece else math.inf
    console(rt).print(table)
    console(rt).print(
        f"best by formula: P* = {best:.1f}; of those measured: {min(counts, key=lambda c: measured[f'T {c}'])}"
    )
    first, _ = gather_multiply(x_BsD, matrix_DF, Pieces(group, 1, Link()))
    last, _ = gather_multiply(x_BsD, matrix_DF, Pieces(group, 16, Link()))
    return difference(first, last) <= TOLERANCE[first.dtype]


def main(rt: Runtime, o: OverlapOptions) -> bool:
    """Prove a Transformer both ways; with --benchmark show T(P) on this machine and on a simulated link."""
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
    right = sweep(rt, o, math.inf, "as messages travel here")
    return sweep(rt, o, 1e9 * o.link, f"a link of {o.link:g} GB/s that we pretend") and right


if __name__ == "__main__":
    run(main, OverlapOptions)
