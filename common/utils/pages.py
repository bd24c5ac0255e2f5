"""The cost of new memory: the kernel maps and clears each page at its first use, often slower than the work itself.

keep_freed_memory()            # blocks that were freed are used again: for programs that repeat operations
new_empty((8192, 8192), ...)   # one block in pages of 2 MiB: for a tensor that stays
new_result((8192, 8192), ...)  # after keep_freed_memory, on MPI: memory that the other ranks of the host can write
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from common.comm import Group

PAGE = 2**21
SHARED = 2**16  # bytes; the transport hands out shared memory in blocks of as many
LARGE = 2**25  # bytes; the C library serves smaller blocks from memory that it keeps
MMAP_MAX, TRIM_THRESHOLD = -4, -1  # glibc's mallopt: blocks of their own, and when the heap is given back
_kept = False


def keep_freed_memory() -> bool:
    """Let the C library keep all memory that is freed, whatever its size, and use it again; return False if it cannot.

    By default glibc maps each block over 32 MiB anew, and every operation that makes one pays for its pages again. The
    process then holds its largest size to its end.
    """
    global _kept
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        _kept = bool(library.mallopt(MMAP_MAX, 0) and library.mallopt(TRIM_THRESHOLD, 2**31 - 1))
    return _kept


def new_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return an uninitialised tensor; of LARGE bytes or more on the CPU, in large pages.

    After `keep_freed_memory` it is ordinary memory, which is used again.
    """
    size = math.prod(shape) * dtype.itemsize
    if _kept or size < LARGE or torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    return _mapped(shape, dtype)


def new_result(shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: Group) -> Tensor:
    """Return an uninitialised tensor for the result of an all-to-all in the group.

    Under mpirun, in a program that called `keep_freed_memory`, it lies in memory that all ranks of the host have
    mapped: each rank writes its pieces straight there, so that they are copied once. Elsewhere it is as `new_empty`
    makes it.
    """
    size = math.prod(shape)
    shared = _kept and device.type == "cpu" and size * dtype.itemsize >= SHARED
    if not shared or group.pg is None or dist.get_backend(group.pg) != "fived":
        return new_empty(shape, dtype, device)
    backend = group.pg._get_backend(device)
    return backend.allocate_tensor(size, dtype=dtype, device=device).view(tuple(shape))


def in_large_pages(x: Tensor) -> Tensor:
    """Return a copy of x in pages of 2 MiB; x itself if it is smaller than one or on a GPU."""
    return x if x.device.type != "cpu" or x.nbytes < PAGE else _mapped(x.shape, x.dtype).copy_(x)


def _mapped(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    with suppress(OSError):  # the system may have been built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
