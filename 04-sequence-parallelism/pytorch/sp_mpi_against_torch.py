"""Ring attention in C++ beside torch's own attention: equality of the results, and speed.

    speed = time of torch on one rank / time of sp_mpi, forward and backward, in turn, one thread per rank

                 sp_mpi (cpp/)                         torch
    ranks        all: a rank has s = S / n positions   one, the whole sequence
    kernel       tiles in C++, sp_tiles.hpp            scaled_dot_product_attention, its own tiles
    messages     keys and values round the ring        none

On one rank nothing is sent, and the ratio compares the kernels. Cost of both: 14 K operations per head and
pair of a query and a visible key, no matrix of scores.

    OMP_NUM_THREADS=1 python sp_mpi_against_torch.py
    mpirun -np 2 --bind-to core python sp_mpi_against_torch.py

B batch  H heads  S sequence  s positions of this rank  K width of a head
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from common import comm
from common.errors import UsageError
from common.launch.command_line import Count, Size
from common.launch.runtime import Runtime
from common.lesson.equality import TOLERANCE, difference
from common.lesson.measure import BenchmarkRecord, Measured, in_turn, peak_memory
from common.lesson.runner import DTYPES, LessonOptions, console, run, write_records


@dataclass
class Options(LessonOptions, without=("data", "plot")):
    """Options: the shape of the timed attention."""

    steps: Count = 5
    """Timed rounds."""
    dtype: Literal["float64", "float32"] = "float32"
    """Type of all numbers."""
    batch: Size = 1
    """Number of samples."""
    heads: Size = 8
    """Number of heads of queries, keys and values."""
    sequence: Size = 8192
    """Positions of the sequence, all ranks together."""
    head_width: Size = 64
    """Width of a head."""


class OnOneRank:
    """Attention of torch on the whole sequence."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.q, self.k, self.v = (x.clone().requires_grad_() for x in tensors[:3])
        self.dout = tensors[3]

    def step(self) -> list[Tensor]:
        """Return [out, dq, dk, dv], each [B, H, S, K]."""
        inputs = (self.q, self.k, self.v)
        out = F.scaled_dot_product_attention(*inputs, is_causal=True)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.dout)]


class OnAllRanks:
    """Attention of sp_mpi on this rank's positions."""

    def __init__(self, tensors: list[Tensor], rt: Runtime, o: Options) -> None:
        from mpi4py import MPI

        import sp_mpi

        self.positions = sp_mpi.positions(o.sequence, rt.world_size, rt.rank)
        self.q, self.k, self.v, self.dout = (x[:, :, self.positions].contiguous().numpy() for x in tensors)
        self.ring = sp_mpi.RingAttention(
            o.batch, o.heads, o.sequence, o.head_width, comm=MPI.COMM_WORLD, dtype=o.dtype
        )
        self.sent = 0

    def step(self) -> list[Tensor]:
        """Return [out, dq, dk, dv], each [B, H, s, K]."""
        out = self.ring.forward(self.q, self.k, self.v)
        sent = self.ring.bytes_sent
        gradients = self.ring.backward(self.dout)
        self.sent = sent + self.ring.bytes_sent
        return [torch.from_numpy(x) for x in (out, *gradients)]


def prepare(rt: Runtime, o: Options) -> None:
    """Raise UsageError where sp_mpi cannot run; limit torch to one thread."""
    try:
        from mpi4py import MPI

        import sp_mpi  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"the Python module {error.name} is not built; run make setup") from None
    if MPI.COMM_WORLD.size != rt.world_size:
        how = f"mpirun -np {rt.world_size} python sp_mpi_against_torch.py"
        raise UsageError(f"sp_mpi needs MPI between its {rt.world_size} ranks; start them with {how}")
    torch.set_num_threads(1)


def main(rt: Runtime, o: Options) -> bool:
    """Compare the results, then time both in turn."""
    prepare(rt, o)
    draw = torch.Generator().manual_seed(o.seed)
    shape = (o.batch, o.heads, o.sequence, o.head_width)
    tensors = [torch.randn(shape, generator=draw, dtype=DTYPES[o.dtype]) for _ in range(4)]
    ours, torchs = OnAllRanks(tensors, rt, o), OnOneRank(tensors)
    expected = [x[:, :, ours.positions] for x in torchs.step()]
    apart = torch.tensor(
        [difference(a, b) for a, b in zip(expected, ours.step(), strict=True)], dtype=torch.float64
    )
    comm.all_reduce(apart, rt.world, "max")
    cases: dict[str, Callable[[], object]] = {
        "sp_mpi": ours.step,
        "torch, one rank": lambda: torchs.step() if rt.rank == 0 else None,
    }
    measured = in_turn(cases, o.steps, rt.world, warm_up=1)
    equal = apart.max().item() <= TOLERANCE[DTYPES[o.dtype]]
    report(rt, o, measured, apart, equal)
    write(rt, o, measured, ours, equal, apart.max().item())
    return equal


def operations(o: Options) -> float:
    """Return the operations: two products of all pairs forward, five backward, 2 K per pair in each."""
    return 14 * o.head_width * o.batch * o.heads * o.sequence * (o.sequence + 1) / 2


def report(rt: Runtime, o: Options, measured: dict[str, Measured], apart: Tensor, equal: bool) -> None:
    """Print the table of times, their ratio and the differences."""
    table = Table(
        title=f"causal attention, {o.sequence} positions, {o.heads} heads of {o.head_width}, {o.dtype}"
    )
    for column in ("forward and backward", "ranks", "ms", "spread", "GFLOP/s"):
        table.add_column(column, justify="left" if column.startswith("forward") else "right")
    for name, m in measured.items():
        ranks = rt.world_size if name == "sp_mpi" else 1
        speed = operations(o) / m.median / 1e9
        table.add_row(name, str(ranks), f"{m.median * 1e3:.1f}", f"{m.spread:.0%}", f"{speed:.1f}")
    ratios = [
        b / a for a, b in zip(measured["sp_mpi"].seconds, measured["torch, one rank"].seconds, strict=True)
    ]
    out = console(rt)
    out.print(table)
    out.print(
        f"sp_mpi on {rt.world_size} rank(s) is {statistics.median(ratios):.2f} times as fast as torch on one "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds, one thread a rank)",
        soft_wrap=True,
    )
    named = zip(("out", "dq", "dk", "dv"), apart.tolist(), strict=True)
    differences = ", ".join(f"{name} {value:.1e}" for name, value in named)
    out.print(f"{'equal' if equal else 'NOT equal'}: largest relative difference {differences}")


def write(
    rt: Runtime, o: Options, measured: dict[str, Measured], ours: OnAllRanks, equal: bool, largest: float
) -> None:
    """Write one record for sp_mpi and one for torch to the file of --json."""
    formula = ours.ring.forward_bytes + ours.ring.backward_bytes
    records = [
        BenchmarkRecord(
            strategy="sp",
            implementation="sp_mpi-zigzag" if name == "sp_mpi" else "torch-sdpa",
            language="cpp-mpi" if name == "sp_mpi" else "pytorch",
            ranks=rt.world_size if name == "sp_mpi" else 1,
            backend="mpi" if name == "sp_mpi" else rt.backend,
            dtype=o.dtype,
            model=f"attention {o.batch} x {o.heads} x {o.sequence} x {o.head_width}, causal",
            parameters=0,
            tokens_per_step=o.batch * o.sequence,
            flop_per_step=int(operations(o)),
            step_seconds=m.seconds,
            communication_seconds=None,
            bytes_counted=float(ours.sent if name == "sp_mpi" else 0),
            bytes_formula=float(formula if name == "sp_mpi" else 0),
            peak_memory_bytes=peak_memory(rt.world),
            scaling="strong",
            equal=equal,
            largest_difference=largest,
        )
        for name, m in measured.items()
    ]
    if rt.rank == 0:
        write_records(o.json, [r.as_json() for r in records])


if __name__ == "__main__":
    run(main, Options)
