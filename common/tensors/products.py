"""Products of distributed matrices."""

from __future__ import annotations

from common.tensors.tensor import DistributedTensor


def matmul(a: DistributedTensor, b: DistributedTensor) -> DistributedTensor:
    """Return a @ b."""
    raise NotImplementedError
