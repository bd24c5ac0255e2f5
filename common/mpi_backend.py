"""torch.distributed on MPI: registers the process group of cpp/c10d as the backend "fived".

    from mpi4py import MPI                       # starts MPI, and ends it once, after everything else
    register()
    dist.init_process_group("fived", store=store, rank=MPI.COMM_WORLD.rank, world_size=MPI.COMM_WORLD.size)

PyTorch's wheels are built without MPI. Collectives go through memory that the ranks of a host share
(cpp/include/fived/shared_memory.hpp), messages through MPI.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch.distributed as dist

NAME = "fived"


def is_built() -> bool:
    """Whether `register` can succeed."""
    return importlib.util.find_spec("fived_c10d") is not None


def register() -> None:
    """Make the backend known to torch.distributed. Raises ImportError where it is not built."""
    import fived_c10d  # noqa: F401

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: object) -> Any:
    from fived_c10d import MpiBackend
    from mpi4py import MPI  # noqa: F401

    ranks = list(options.global_ranks_in_group)
    return MpiBackend(options.group_rank, options.group_size, options.group_id, ranks, options.timeout)
