"""Times of operations on split tensors: beside torch on one rank, and beside the libraries that are installed.

    mpirun -np 2 --bind-to core python common/tensors/examples/speed.py
    mpirun -np 2 --bind-to core python common/tensors/examples/speed.py --cases matmul fft2 --scale 0.5

Three figures of ours: `resident`, operands and result stay split; `and redistributed`, operands come from another
layout and the result goes back to one; `from rank 0`, which holds whole operands and gets the whole result.
The cases that begin with `large` are a product of 10000 rows, a convolution of 32 images of 512 x 512 and transforms of
64 of 1024 x 1024, with shorter lengths where the ranks of a machine would need more than half of its free memory.
--scale 0.5 halves all lengths.
All cases of an operation run in turn; `x` is the time as a share of torch's on one rank, the median over the rounds.
`no communication` is what each rank computes without a message, the ceiling; it runs again before each operation that
is compared with it, and `of ceiling` is the operation's time as a share of it, again the median over the rounds.
The last two columns are the lower quartile and its share of torch's; other programs change it less than the median.
Each rank has one thread, and so has torch. Libraries: DTensor of torch; Heat and mpi4py-fft if they can be imported.
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, get_args

import opt_einsum
import psutil
import torch
from opt_einsum.testing import rand_equation
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from common import comm
from common.comm import Group
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.measure import BenchmarkRecord, Measured, in_turn, peak_memory
from common.lesson.runner import LessonOptions, console, run, write_records
from common.tensors import (
    DistributedTensor,
    Grid,
    Layout,
    Rates,
    Replicate,
    Shard,
    conv2d,
    einsum,
    explain,
    expression,
    fft2,
    from_root,
    matmul,
    normal,
    rfft2,
)
from common.tensors.calibrate import calibrate
from common.tensors.layout import Placement
from common.tensors.make import to_dtensor
from common.utils.pages import keep_freed_memory

Call = Callable[[], object]
Name = Literal[
    "matmul",
    "placements",
    "conv2d",
    "fft2",
    "rfft2",
    "redistribute",
    "sum",
    "max",
    "einsum",
    "large_matmul",
    "large_conv2d",
    "large_fft2",
]
ALONE, CEILING = "torch, one rank", "no communication"
UNCOUNTED = "DTensor", "Heat", "mpi4py-fft, transposed"
"""Libraries that send by themselves: their bytes are not seen."""
HEAD = "", ">ms", ">spread", ">x", ">of all rounds", ">of ceiling", ">lower quartile, ms", ">its x"


@dataclass
class SpeedOptions(LessonOptions, without=("steps", "data", "trace", "plot", "debug", "check", "dtype")):
    """Options of the benchmark."""

    cases: tuple[Name, ...] = tuple(n for n in get_args(Name) if not n.startswith("large"))
    """Operations to time; default: all but the large ones."""
    rounds: Annotated[int, Within(5, 10**4)] = 7
    """Times that each call is timed, in turn with the others."""
    scale: Annotated[float, Within(0.01, 4)] = 1.0
    """Factor of the lengths; 1: matrices of 4096 rows."""
    rates: str = ""
    """File of calibrate.py, for the choice of ways; default: measure now."""


class Bench:
    """The ranks, and the calls of each operation by name."""

    def __init__(self, rt: Runtime, scale: float) -> None:
        self.rt, self.grid, self.scale = rt, Grid(rt.world), scale
        self.n = max(16, int(4096 * scale))
        self.mesh = init_device_mesh("cpu", (rt.world_size,)) if rt.world_size > 1 else None

    def fitting(self, length: int, dims: int, numbers: int) -> int:
        """Return the length times the scale, or less: so much that tensors of that many numbers fit into free memory.

        dims: dimensions of this length. Half of the memory is for them: all ranks together hold about 8 times the
        numbers, as rank 0 has whole tensors beside those that are split in several ways.
        """
        free = min(comm.everyones(psutil.virtual_memory().available, self.rt.world)) / 2
        fits: float = (free / (8 * 4 * numbers)) ** (1 / dims)
        return max(16, int(length * min(self.scale, fits)))

    def alone(self, call: Call) -> Call:
        """Return a call that rank 0 makes while the others wait."""
        return call if self.rt.rank == 0 else lambda: None

    def from_rank_0(self, operation: Callable[..., DistributedTensor], *wholes: Tensor) -> Call:
        """Return the operation between spreading whole operands and gathering the result."""
        given = wholes if self.rt.rank == 0 else (None,) * len(wholes)
        rows: list[Any] = [Shard(0), *(Replicate() for _ in wholes[1:])]
        return lambda: operation(
            *(from_root(x, self.grid, p) for x, p in zip(given, rows, strict=True))
        ).on_root()

    def matmul(self) -> tuple[dict[str, Call], float]:
        """Return the product of two square matrices."""
        n, grid = self.n, self.grid
        a, b = normal((n, n), grid, Shard(0), 1), normal((n, n), grid, Shard(0), 2)
        A, B, half = torch.rand(n, n), torch.rand(n, n), torch.rand(-(-n // grid.world.size), n)
        x, y = a.redistribute(Shard(1)), b.redistribute(Shard(1))
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: torch.mm(A, B)),
            CEILING: lambda: torch.mm(half, B),
            "resident": partial(matmul, a, b),
            "and redistributed": lambda: matmul(x.redistribute(Shard(0)), y).redistribute(Shard(1)),
            "from rank 0": self.from_rank_0(matmul, A, B),
        }
        if self.mesh is not None:
            c, d = to_dtensor(a, self.mesh), to_dtensor(b, self.mesh)
            calls["DTensor"] = lambda: c @ d
        if ht := heat():
            e, f = (ht.array(t.local, is_split=0) for t in (a, b))
            calls["Heat"] = lambda: ht.matmul(e, f)
        return calls, 2.0 * n**3

    def large_matmul(self) -> tuple[dict[str, Call], float]:
        """Return the product of matrices of 10000 rows, times the scale."""
        n = self.fitting(10000, 2, 3 * 10000**2)
        a, b = by_rows(self.grid, n), by_rows(self.grid, n)
        A, B, x = torch.rand(n, n), torch.rand(n, n), a.redistribute(Shard(1))
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: torch.mm(A, B)),
            "resident": partial(matmul, a, b),
            "and redistributed": lambda: matmul(x.redistribute(Shard(0)), b).redistribute(Shard(1)),
            "from rank 0": self.from_rank_0(matmul, A, B),
        }
        return calls, 2.0 * n**3

    def placements(self) -> tuple[dict[str, Call], float]:
        """Return the product for each pair of placements, beside the ceiling without communication."""
        n, grid = self.n, self.grid
        kinds: dict[str, Placement] = {"whole": Replicate(), "rows": Shard(0), "columns": Shard(1)}
        tensors = {name: normal((n, n), grid, p) for name, p in kinds.items()}
        whole, half = torch.rand(n, n), torch.rand(-(-n // grid.world.size), n)
        calls: dict[str, Call] = {ALONE: self.alone(lambda: torch.mm(whole, whole))}
        calls[CEILING] = lambda: torch.mm(half, whole)
        for p, q in itertools.product(kinds, kinds):
            calls[f"{p} x {q}"] = partial(matmul, tensors[p], tensors[q])
        return calls, 2.0 * n**3

    def large_conv2d(self) -> tuple[dict[str, Call], float]:
        """Return a convolution of 32 images of 512 x 512, times the scale."""
        return self.conv2d(32, self.fitting(512, 2, 32 * (64 + 128) * 512**2))

    def conv2d(self, images: int = 8, side: int = 0) -> tuple[dict[str, Call], float]:
        """Return a convolution of images that are split along H. side: their height; default: 128, times the scale."""
        side, grid = side or max(16, int(128 * self.scale)), self.grid
        x, w = normal((images, 64, side, side), grid, Shard(2)), normal((128, 64, 3, 3), grid, Replicate())
        X, W = torch.rand(images, 64, side, side), w.local
        batch = x.redistribute(Shard(0))
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: torch.conv2d(X, W, padding=1)),
            CEILING: lambda: torch.conv2d(x.local, W, padding=1),
            "resident": partial(conv2d, x, w, padding=1, way="height"),
            "and redistributed": lambda: conv2d(batch.redistribute(Shard(2)), w, padding=1).redistribute(
                Shard(0)
            ),
            "from rank 0": self.from_rank_0(lambda x, w: conv2d(x, w, padding=1), X, W),
        }
        return calls, 2.0 * images * 128 * 64 * 9 * side**2

    def fft2(self) -> tuple[dict[str, Call], float]:
        """Return two-dimensional transforms of a matrix that is split by rows."""
        n, grid = self.n, self.grid
        x = normal((n, n), grid, Shard(0), dtype=torch.complex64)
        X, y = torch.rand(n, n, dtype=torch.complex64), x.redistribute(Shard(1))
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: torch.fft.fft2(X)),
            "transposed": partial(fft2, x, order="transposed"),
            "resident": partial(fft2, x),
            "and redistributed": lambda: fft2(y.redistribute(Shard(0)), order="transposed"),
            "from rank 0": self.from_rank_0(fft2, X),
        }
        if ht := heat():
            z = ht.array(x.local, is_split=0)
            calls["Heat"] = lambda: ht.fft.fft2(z)
        if transform := mpi4py_fft(n, x.local):
            calls["mpi4py-fft, transposed"] = transform
        return calls, 5.0 * n * n * 2 * math.log2(n)

    def rfft2(self) -> tuple[dict[str, Call], float]:
        """Return two-dimensional transforms of a real matrix that is split by rows."""
        n, x, X = self.n, normal((self.n, self.n), self.grid, Shard(0)), torch.rand(self.n, self.n)
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: torch.fft.rfft2(X)),
            "transposed": partial(rfft2, x, order="transposed"),
            "resident": partial(rfft2, x),
        }
        return calls, 2.5 * n * n * 2 * math.log2(n)

    def large_fft2(self) -> tuple[dict[str, Call], float]:
        """Return the transforms of 64 matrices of 1024 x 1024, times the scale, that are split along their rows."""
        n, grid = self.fitting(1024, 2, 2 * 2 * 64 * 1024**2), self.grid
        x, X = (
            normal((64, n, n), grid, Shard(1), dtype=torch.complex64),
            torch.rand(64, n, n, dtype=torch.complex64),
        )
        y = x.redistribute(Shard(0))
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: torch.fft.fft2(X)),
            "each rank some of them": partial(fft2, y),
            "resident": partial(fft2, x),
            "and redistributed": lambda: fft2(y.redistribute(Shard(1))).redistribute(Shard(0)),
            "from rank 0": self.from_rank_0(fft2, X),
        }
        return calls, 64 * 5.0 * n * n * 2 * math.log2(n)

    def redistribute(self) -> tuple[dict[str, Call], float]:
        """Return the move of a matrix from rows to columns."""
        n, grid = 2 * self.n, self.grid
        x, X = by_rows(grid, n), torch.rand(n, n)
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: X.T.contiguous()),
            "resident": lambda: x.redistribute(Shard(1)),
        }
        if self.mesh is not None:
            from torch.distributed.tensor import Shard as TorchShard

            d = to_dtensor(x, self.mesh)
            calls["DTensor"] = lambda: d.redistribute(placements=[TorchShard(1)])
        if ht := heat():
            h = ht.array(x.local, is_split=0)
            calls["Heat"] = lambda: ht.resplit(h, 1)
        return calls, 0.0

    def sum(self) -> tuple[dict[str, Call], float]:
        """Return the sum along the dimension that is split."""
        return self.reduction("sum", torch.sum, lambda x: x.sum(0).redistribute(Replicate()))

    def max(self) -> tuple[dict[str, Call], float]:
        """Return the largest numbers along the dimension that is split."""
        return self.reduction("max", torch.amax, lambda x: x.max(0))

    def reduction(
        self, name: str, alone: Callable[[Tensor, int], Tensor], ours: Callable[[DistributedTensor], object]
    ) -> tuple[dict[str, Call], float]:
        """Return a reduction along the dimension that is split."""
        n = 2 * self.n
        x, X = by_rows(self.grid, n), torch.rand(n, n)
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: alone(X, 0)),
            "resident": lambda: ours(x),
        }
        if ht := heat():
            h = ht.array(x.local, is_split=0)
            calls["Heat"] = lambda: getattr(ht, name)(h, axis=0)
        return calls, float(n * n)

    def einsum(self) -> tuple[dict[str, Call], float]:
        """Return a random network of 12 tensors, each joined to others by some four dimensions."""
        longest = max(3, round(16 * self.scale**0.25))
        equation, shapes = rand_equation(12, 4, n_out=2, d_min=longest // 2, d_max=longest, seed=1)
        path, info = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
        grid = self.grid
        split = [
            normal(s, grid, Shard(max(range(len(s)), key=lambda d: s[d])), seed=i)
            for i, s in enumerate(shapes)
        ]
        wholes = [x.full() for x in split]
        f, alone = (
            expression(equation, *shapes),
            opt_einsum.contract_expression(equation, *shapes, optimize=path),
        )
        calls: dict[str, Call] = {
            ALONE: self.alone(lambda: alone(*wholes, backend="torch")),
            "resident": lambda: f(*split),
            "and redistributed": lambda: einsum(equation, *split).full(),
            "from rank 0": self.from_rank_0(f, *wholes),
        }
        return calls, float(info.opt_cost)


def by_rows(grid: Grid, n: int) -> DistributedTensor:
    """Return a square matrix of random numbers, split by rows."""
    layout = Layout.of(grid, (n, n), Shard(0))
    return DistributedTensor(torch.rand(layout.local_shape), layout)


def heat() -> Any:
    """Return Heat, or None if it cannot be imported."""
    try:
        return importlib.import_module("heat")
    except Exception:
        return None


def mpi4py_fft(n: int, local: Tensor) -> Call | None:
    """Return mpi4py-fft's transform by slabs, or None if it cannot be imported."""
    try:
        pfft = importlib.import_module("mpi4py_fft")
        from mpi4py import MPI

        plan = pfft.PFFT(MPI.COMM_WORLD, [n, n], axes=(0, 1), dtype="F", grid=(-1,))
        u = pfft.newDistArray(plan, False)
        u[:] = local.numpy()[: u.shape[0], : u.shape[1]]
        return lambda: plan.forward(u)
    except Exception:
        return None


def timed(calls: dict[str, Call], rounds: int, group: Group) -> tuple[dict[str, Measured], dict[str, float]]:
    """Time the calls in turn; return the results and, where there is a ceiling, their shares of it.

    A machine's speed changes within seconds, so the ceiling runs once more right before each call.
    """
    turns = {}
    for who, call in calls.items():
        if CEILING in calls and who not in (ALONE, CEILING):
            turns[f"{CEILING} before {who}"] = calls[CEILING]
        turns[who] = call
    with torch.no_grad():
        found = in_turn(turns, rounds, group)
    return {who: found[who] for who in calls}, {
        who: statistics.median(share(found[who], before))
        for who in calls
        if (before := found.get(f"{CEILING} before {who}"))
    }


def share(of: Measured, other: Measured) -> list[float]:
    """Return the time as a share of another's, in each round."""
    return [a / b for a, b in zip(of.seconds, other.seconds, strict=True)]


def main(rt: Runtime, o: SpeedOptions) -> bool:
    """Time the operations and print a table for each."""
    keep_freed_memory()
    bench, records = Bench(rt, o.scale), []
    bench.grid.rates = Rates.load(o.rates) if o.rates else calibrate(bench.grid, seconds=0.05)
    for name in o.cases:
        calls, flops = getattr(bench, name)()
        found, of_ceiling = timed(calls, o.rounds, rt.world)
        rows = []
        for who, m in found.items():
            x = share(m, found[ALONE])
            numbers = f"{m.median * 1e3:.1f}", f"{m.spread:.0%}", f"{statistics.median(x):.3f}"
            early, early_x = quartile(m), quartile(m) / quartile(found[ALONE])
            of = f"{of_ceiling[who]:.3f}" if who in of_ceiling else ""
            rows.append(
                (who, *numbers, f"{min(x):.3f}-{max(x):.3f}", of, f"{early * 1e3:.1f}", f"{early_x:.3f}")
            )
            one = who.startswith("torch")
            records.append(
                record(name, who, 1 if one else rt.world_size, rt, m, flops, formula(calls[who])).as_json()
            )
        title = f"{name}, {flops / 1e9:,.3g} GFLOP" if flops else name
        console(rt).print(make_table(title, HEAD, rows))
    if rt.rank == 0:
        write_records(o.json, records)
    return True


def quartile(m: Measured) -> float:
    """Return the lower quartile of the rounds, in seconds. Other programs only lengthen a round."""
    return statistics.quantiles(m.seconds, n=4, method="inclusive")[0]


def formula(call: Call) -> float | None:
    """Return the bytes that this rank sends by the cost of the chosen way; None if the call is not one operation."""
    if not isinstance(call, partial):
        return None
    found = explain(call.func, *call.args, **call.keywords)
    return next(float(c.way.cost.sent) for c in found.candidates if c.way.name == found.chosen)


def record(
    name: str, who: str, ranks: int, rt: Runtime, m: Measured, flops: float, by_formula: float | None
) -> BenchmarkRecord:
    """Return a line of --json."""
    return BenchmarkRecord(
        strategy="tensors",
        implementation=f"{name}, {who}",
        language="pytorch",
        ranks=ranks,
        backend=rt.backend,
        dtype="float32",
        model=name,
        parameters=0,
        tokens_per_step=0,
        flop_per_step=int(flops),
        step_seconds=m.seconds,
        communication_seconds=None,
        bytes_counted=None if who in UNCOUNTED else statistics.median(m.sent),
        bytes_formula=by_formula,
        peak_memory_bytes=peak_memory(rt.world),
        scaling="strong",
    )


if __name__ == "__main__":
    run(main, SpeedOptions)
