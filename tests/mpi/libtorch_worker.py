"""Run the checks of the LibTorch modules on groups of 1 to all ranks, importing torch once.

python libtorch_worker.py RESULT MODULE..., under mpirun; rank 0 writes {module: {ranks: results by rank}}.
"""

from __future__ import annotations

import importlib
import sys

from mpi.worker import write

if __name__ == "__main__":
    write({name: importlib.import_module(f"mpi.{name}_worker").on_mpi() for name in sys.argv[2:]})
