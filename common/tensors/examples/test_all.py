"""Every operation with whole tensors on rank 0, compared with torch on that rank.

    mpirun -np 4 python common/tensors/examples/test_all.py

Exit code 0 if all errors are below their limits, 1 otherwise. An error is the largest difference, as a share of the
largest number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from common.launch.command_line import Checked, Within, parse
from common.launch.program import run_program
from common.launch.terminal import make_table, terminal
from common.tensors import manager
from common.tensors.manager import GPUManager, MPIManager, Profiler, TensorDistributor


@dataclass
class Options(Checked):
    """Options: the sizes."""

    scale: Annotated[float, Within(0.05, 4)] = 1.0
    """Factor of the lengths of the largest dimensions; 1 takes about a minute on a laptop."""


class Case(NamedTuple):
    """An operation: operands, torch's version, ours, and the largest error that is allowed."""

    operands: tuple[Tensor, ...]
    theirs: Callable[..., Tensor]
    ours: Callable[..., Tensor | None]
    limit: float = 1e-4


def cases(scale: float) -> dict[str, Case]:
    """Return all operations with random operands."""
    numbers = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers)

    def scaled(*shape: int) -> Tensor:
        return random(*(max(4, int(n * scale)) for n in shape))

    side = max(8, int(128 * scale))
    image, kernel = random(max(2, int(32 * scale)), 64, side, side), random(128, 64, 3, 3)
    volume, cube = random(2, 8, side // 4, side // 4, side // 4), random(16, 8, 3, 3, 3)
    block, lines = random(64, 128, 128), random(64, 1024)
    a, b = scaled(1000, 1000), scaled(1000, 1000)
    c, d = scaled(32, 256, 256), scaled(32, 256, 256)
    e, f = random(32, 128, 128), random(32, 128, 128)
    spectrum = torch.fft.fft(lines)
    m = manager
    return {
        "matmul": Case((a, b), torch.matmul, m.distributed_matmul),
        "batch_matmul": Case((c, d), torch.bmm, m.distributed_batch_matmul),
        "transpose": Case((a,), lambda x: x.T, m.distributed_transpose, 0.0),
        "add": Case((a, b), torch.add, m.distributed_add, 0.0),
        "conv2d": Case(
            (image, kernel),
            lambda x, w: torch.conv2d(x, w, padding=1),
            lambda x, w, mpi, cut: m.distributed_conv2d(x, w, mpi, cut, padding=(1, 1)),
        ),
        "conv3d": Case(
            (volume, cube),
            lambda x, w: torch.conv3d(x, w, padding=1),
            lambda x, w, mpi, cut: m.distributed_conv3d(x, w, mpi, cut, padding=(1, 1, 1)),
        ),
        "fft": Case((lines,), torch.fft.fft, m.distributed_fft),
        "ifft": Case((spectrum,), torch.fft.ifft, m.distributed_ifft),
        "rfft": Case((lines,), torch.fft.rfft, m.distributed_rfft),
        "fft2d": Case((c,), torch.fft.fft2, m.distributed_fft2d),
        "einsum": Case(
            (e, f),
            lambda x, y: torch.einsum("bij,bjk->bik", x, y),
            lambda x, y, mpi, cut: m.distributed_einsum("bij,bjk->bik", x, y, mpi=mpi, distributor=cut),
        ),
        "tensordot": Case(
            (a, b),
            lambda x, y: torch.tensordot(x, y, 1),
            lambda x, y, mpi, cut: m.distributed_tensordot(x, y, 1, mpi, cut),
        ),
        "sum": Case((block,), torch.sum, m.distributed_sum),
        "mean": Case((block,), torch.mean, m.distributed_mean, 1e-5),
        "max": Case((block,), torch.amax, m.distributed_max, 0.0),
        "min": Case((block,), torch.amin, m.distributed_min, 0.0),
    }


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest number, or of 1 if that is larger."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    return float((found.cpu() - expected).abs().max() / expected.abs().max().clamp(min=1))


def main(o: Options) -> int:
    """Run all operations; print their errors, their times and the memory on rank 0; return the exit code."""
    with MPIManager() as mpi:
        distributor, profiler, failed, rows = TensorDistributor(mpi), Profiler(), 0, []
        for name, case in cases(o.scale).items():
            given = case.operands if mpi.is_master_process() else (None,) * len(case.operands)
            mpi.barrier()
            profiler.start(name)
            found = case.ours(*given, mpi, distributor)
            profiler.end(name)
            if found is not None:
                error = error_of(found, case.theirs(*case.operands))
                good = error <= case.limit
                failed += not good
                rows.append((name, f"{error:.1e}", f"{case.limit:.0e}", "passed" if good else "FAILED"))
        if mpi.is_master_process():
            heads = ("operation", ">error", ">limit", "")
            terminal(plain=True).print(make_table("largest errors", heads, rows))
            profiler.print_summary()
            memory = GPUManager(mpi.get_gpu_id()).get_memory()
            print(f"memory: {memory['used'] / 1e9:.1f} of {memory['total'] / 1e9:.1f} GB in use")
            print(f"{len(rows) - failed}/{len(rows)} passed on {mpi.get_size()} rank(s)")
        return int(mpi.broadcast(failed) > 0)


if __name__ == "__main__":
    run_program(lambda: main(parse(Options, description=__doc__)))
