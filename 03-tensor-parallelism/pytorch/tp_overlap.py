"""Messages behind products: the all-gather before a layer and the reduce-scatter after it, cut into pieces.

    whole     |------- gather -------|------------ multiply ------------|
    pieces    |- g0 -|- g1 -|- g2 -|
                     |--- m0 ---|--- m1 ---|--- m2 ---|                    each is multiplied as it arrives

With Megatron's sequence parallelism every region begins with an all-gather and ends with a reduce-scatter of B S D
numbers, and the product next to each cannot wait for another: it needs the message. But a row of the product needs one
row of the input. So the rank cuts its slice of the sequence into P pieces, and piece j + 1 travels while piece j is
multiplied; at the end of the region the other way round (Wang et al., "Overlap communication with dependent computation
via decomposition", ASPLOS 2023). The adjoint of one is the other, so the backward pass overlaps as well.

    T(P) = max(Tc, Tm) + min(Tc, Tm) / P + P o        best at P* = sqrt(min(Tc, Tm) / o)

Tc the product, Tm the message, o what a piece more costs. The gain is at most a factor of 2, at Tc = Tm.

Cost: the bytes of the plain version. Memory: one piece more in flight.

    python tp_overlap.py --nproc 4     torchrun --nproc_per_node=4 tp_overlap.py     mpirun -np 4 python tp_overlap.py
    mpirun -np 2 --bind-to core python tp_overlap.py --benchmark --dtype float32      # T(P), by formula and measured
    mpirun -np 2 --bind-to core python tp_overlap.py --benchmark --trace traces       # and where the time went
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import torch
from rich.table import Table
from torch import Tensor, nn
from tp_megatron import MegatronOptions, check_split, tensor_parallel
from tp_megatron import step_bytes as megatron_bytes
from tp_training import lesson, tp_group

from common import comm
from common.comm import Group, Pending, sizes_of
from common.equality import TOLERANCE, difference
from common.errors import UsageError
from common.lesson import DTYPES, console, run
from common.measure import in_turn
from common.mesh import Mesh
from common.models.transformer import Transformer
from common.options import Size, Within
from common.placement import sum_gradients
from common.runtime import Runtime
from common.training import Version

VERSIONS = ("whole", "pieces")
LINK = 0.1  # GB/s of the link that the benchmark pretends


class Link:
    """What carries the messages: the process group, and nothing sooner than a link of `speed` bytes a second would."""

    def __init__(self, speed: float = math.inf) -> None:
        self.speed, self.free = speed, 0.0

    def send(self, start: Callable[[], Pending], size: float) -> Callable[[], None]:
        """Start a message of which this rank sends `size` bytes; the result waits for it."""
        pending = start()
        self.free = due = max(self.free, time.perf_counter()) + size / self.speed

        def wait() -> None:
            pending.wait()
            time.sleep(max(0.0, due - time.perf_counter()))

        return wait


@dataclass(frozen=True)
class Pieces:
    """How a rank's slice of the sequence is cut, and what carries the pieces."""

    group: Group
    count: int
    link: Link

    def places(self, length: int) -> list[tuple[int, int]]:
        """[lo, hi) of each piece; no more pieces than positions."""
        sizes = sizes_of(length, min(self.count, length))
        return [(sum(sizes[:j]), sum(sizes[: j + 1])) for j in range(len(sizes))]

    def sent(self, x: Tensor) -> float:
        """Bytes that this rank sends where x is the whole of a gather or of a scatter."""
        return x.numel() * x.element_size() * (self.group.size - 1) / self.group.size


def gather_multiply(x_BsD: Tensor, matrix_DF: Tensor, pieces: Pieces) -> tuple[Tensor, list[Tensor]]:
    """(gather(x) matrix, of the whole sequence; the gathered pieces [n, B, piece, D]): S(1) to R.

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
    """This rank's slice of the sum over ranks of x matrix: P to S(1).

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
    """Sum over tokens of whole^T gathered, [f, D]."""
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
    """The layer that opens a region: x_BsD, a slice of the sequence, to y_BSf."""

    def __init__(self, linear: Any, pieces: Pieces) -> None:
        super().__init__()
        self.weight, self.bias, self.pieces = linear.weight, linear.bias, pieces

    def forward(self, x_BsD: Tensor) -> Tensor:
        y_BSf: Tensor = _GatherLinear.apply(x_BsD, self.weight, self.pieces)
        return y_BSf if self.bias is None else y_BSf + self.bias


class OverlappedDown(nn.Module):
    """The layer that closes it: x_BSf to y_BsD, a slice of the sequence."""

    def __init__(self, linear: Any, pieces: Pieces) -> None:
        super().__init__()
        self.weight, self.bias, self.pieces = linear.weight, linear.bias, pieces

    def forward(self, x_BSf: Tensor) -> Tensor:
        y_BsD: Tensor = _LinearScatter.apply(x_BSf, self.weight, self.pieces)
        return y_BsD if self.bias is None else y_BsD + self.bias


def overlap(model: Transformer, pieces: Pieces) -> Transformer:
    """Overlap both ends of every MLP of a model that is sequence parallel; attention stays as it is."""
    for layer in model.layers:
        mlp: Any = layer.mlp
        mlp._forward_pre_hooks.clear()  # the region's gather, which up_proj does now
        mlp.up_proj, mlp.down_proj = OverlappedUp(mlp.up_proj, pieces), OverlappedDown(mlp.down_proj, pieces)
    return model


@dataclass
class OverlapOptions(MegatronOptions):
    """Model and batch of this lesson."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""
    pieces: Size = 2
    """Pieces into which a rank cuts its slice."""
    link: Annotated[float, Within(1e-6, 1e6)] = LINK
    """GB/s of the link that --benchmark pretends in its second table."""


def make_version(name: str, model: nn.Module, rt: Runtime, o: OverlapOptions) -> Version:
    """Megatron's sequence parallelism, its messages whole or in pieces."""
    assert isinstance(model, Transformer)
    mesh = Mesh(rt.world, tp=rt.world_size)
    tensor_parallel(model, mesh.group("tp"), sequence_parallel=True)
    if name == "pieces":
        overlap(model, Pieces(mesh.group("tp"), o.pieces, Link()))
    parameters = list(model.parameters())
    return Version(model, finish=lambda: sum_gradients(parameters, mesh), loss=model.loss)


def step_bytes(name: str, model: nn.Module, group: Group, o: OverlapOptions) -> Fraction:
    """Bytes a rank sends in a step: those of whole messages."""
    return megatron_bytes("sequence-parallel", model, group, o)


def predicted(compute: float, message: float, piece: float, count: int) -> float:
    """T(P), in the units of what is given."""
    return max(compute, message) + min(compute, message) / count + count * piece


def sweep(rt: Runtime, o: OverlapOptions, speed: float, title: str) -> bool:
    """T(P) of the layer that opens an MLP, forward, by formula and measured; are all results the same?"""
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
    """A Transformer both ways; with --benchmark T(P) on this machine and on the link that we pretend."""
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
        return lesson(rt, o, VERSIONS, make_version, step_bytes)
    if rt.world_size > 1:
        torch.set_num_threads(1)
    right = sweep(rt, o, math.inf, "as messages travel here")
    return sweep(rt, o, 1e9 * o.link, f"a link of {o.link:g} GB/s that we pretend") and right


if __name__ == "__main__":
    run(main, OverlapOptions)
