"""Memory in pages of 2 MiB, where the system has them: a new block then faults once per 2 MiB, not once per 4 KiB."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2**21
LARGE = 2**25  # bytes; the C library serves smaller blocks from memory that it keeps


def new_empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", least: int = LARGE
) -> Tensor:
    """Return an uninitialised tensor, in large pages if it lies on the CPU and has at least `least` bytes."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < least or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    memory = mmap.mmap(-1, size)
    with suppress(OSError):  # the system may have been built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def in_large_pages(x: Tensor) -> Tensor:
    """Return a copy of x in pages of 2 MiB; x itself if it is smaller than one or on a GPU."""
    return (
        x if x.device.type != "cpu" or x.nbytes < PAGE else new_empty(x.shape, x.dtype, least=PAGE).copy_(x)
    )
