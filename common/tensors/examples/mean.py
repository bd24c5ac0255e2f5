"""The smallest program with a distributed tensor: `mpirun -np 4 python common/tensors/examples/mean.py`."""

from __future__ import annotations

from common.launch.runtime import runtime
from common.tensors import Grid, Shard, from_function


def main(grid: Grid) -> None:
    """Print the mean of a matrix that is split by rows."""
    x = from_function(lambda i, j: 10 * i + j, (5, 4), grid, Shard(0))
    mean = float(x.mean().full())
    if grid.world.rank == 0:
        print(mean)


if __name__ == "__main__":
    with runtime() as rt:  # finds out whether mpirun, torchrun or nothing started this process
        main(Grid(rt.world))
