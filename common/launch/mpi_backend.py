"""torch.distributed on MPI: registers the process group of cpp/c10d as the backend "fived".

    from mpi4py import MPI                       # starts MPI, and ends it once, at exit
    register()
    dist.init_process_group("fived", store=store, rank=MPI.COMM_WORLD.rank, world_size=MPI.COMM_WORLD.size)

PyTorch's wheels are built without MPI. Collectives go through memory that the ranks of a host share
(cpp/include/fived/mpi/shared_memory.hpp) and by MPI between hosts (hosts.hpp), messages by MPI.

Three environment variables let tests on one machine take the code paths of others:
    FIVED_RANKS_PER_HOST=2      take ranks 0 and 1 for one host, 2 and 3 for the next, and so on
    FIVED_LARGEST_MESSAGE=1000  bytes that MPI carries in one message; longer ones travel in pieces
    FIVED_STAGED=1              copy every tensor to other memory and back, as those of GPUs are
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch.distributed as dist

from common.errors import UsageError

NAME = "fived"


def is_built() -> bool:
    """Return True if the backend is built, so that `register` can succeed."""
    return importlib.util.find_spec("fived_c10d") is not None


def register() -> None:
    """Register the backend with torch.distributed. Raises ImportError if it is not built."""
    import fived_c10d  # noqa: F401

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _number(name: str, otherwise: int, least: int) -> int:
    given = os.environ.get(name, str(otherwise))
    if not given.isdecimal() or int(given) < least:
        raise UsageError(f"{name}={given}: give a whole number, at least {least}")
    return int(given)


def _create(given: Any, _: object) -> Any:
    from fived_c10d import GroupOptions, MpiBackend
    from mpi4py import MPI  # noqa: F401

    options = GroupOptions(given.timeout)
    options.ranks_per_host = _number("FIVED_RANKS_PER_HOST", 0, least=0)
    options.largest_message = _number("FIVED_LARGEST_MESSAGE", options.largest_message, least=1)
    options.staged = os.environ.get("FIVED_STAGED") == "1"
    ranks = list(given.global_ranks_in_group)
    try:
        return MpiBackend(given.group_rank, given.group_size, given.group_id, ranks, options)
    except RuntimeError as error:
        if "/dev/shm has no room" in str(error):
            raise UsageError(f"{error}, or use --backend gloo") from None
        raise
