"""The smallest program: a product of two matrices that rank 0 holds, and the same with tensors that stay split.

    mpirun -np 4 python common/tensors/examples/matrix_multiplication.py --size 2000

Exit code 0 if both agree with torch on rank 0, 1 otherwise.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

import torch

from common.launch.command_line import Checked, Within, parse
from common.launch.program import run_program
from common.tensors import Shard, matmul, uniform
from common.tensors.manager import MPIManager, TensorDistributor, distributed_matmul


@dataclass
class Options(Checked):
    """Options: the size."""

    size: Annotated[int, Within(1, 50_000)] = 2000
    """Rows and columns of the matrices."""


def main(o: Options) -> int:
    """Multiply, print times and the largest difference, and return the exit code."""
    with MPIManager() as mpi:
        distributor = TensorDistributor(mpi)
        A = torch.rand(o.size, o.size) if mpi.is_master_process() else None
        B = torch.rand(o.size, o.size) if mpi.is_master_process() else None
        start = time.perf_counter()
        C = distributed_matmul(A, B, mpi, distributor)
        mpi.print_master(
            f"from rank 0 and back: {time.perf_counter() - start:.3f} s on {mpi.get_size()} rank(s)"
        )

        a = uniform((o.size, o.size), distributor.grid, Shard(0), seed=1)
        b = uniform((o.size, o.size), distributor.grid, Shard(0), seed=2)
        mpi.barrier()
        start = time.perf_counter()
        c = matmul(a, b)
        mpi.barrier()
        mpi.print_master(f"split before and after: {time.perf_counter() - start:.3f} s")

        right = True
        given = {"whole on rank 0": (A, B, C), "split": (a.on_root(), b.on_root(), c.on_root())}
        for name, (x, y, z) in given.items():
            if x is not None and y is not None and z is not None:
                apart = float((x @ y - z).abs().max()) / o.size
                right &= apart < 1e-5
                print(f"{name}: largest difference from torch, per term of a sum: {apart:.1e}")
        return 0 if mpi.broadcast(right) else 1


if __name__ == "__main__":
    run_program(lambda: main(parse(Options, description=__doc__)))
