"""Check split tensors by random examples on MPI, whose ranks exchange views with gaps.

python tensors_worker.py EXAMPLES, under mpirun; the exit code says whether all agree with torch.
"""

from __future__ import annotations

import sys
from functools import partial

import tensor_cases as cases
from test_collectives import exchange_views
from test_tensors import move
from test_tensors_convolution import convolve
from test_tensors_fourier import matrices

from common.launch.runtime import runtime

if __name__ == "__main__":
    with runtime(backend="mpi") as rt:
        exchange_views(rt)
        for check in (partial(move, longest=40), partial(matrices, widest=300), convolve):
            cases.examples_of(rt, check, int(sys.argv[1]))
