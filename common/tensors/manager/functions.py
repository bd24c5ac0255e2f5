"""Operations with whole tensors on rank 0: it spreads them, all ranks compute, and rank 0 gets the whole result.

    C = distributed_matmul(A, B, mpi, distributor)      # A, B and C are None on all ranks but 0

Each is the operation of `common.tensors` between `from_root` and `on_root`. Sending whole tensors from one rank and
back often takes longer than the operation: keep tensors split between operations where there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from common.errors import UsageError
from common.tensors import contraction, convolution, fourier, products, reductions
from common.tensors.fourier import Norm
from common.tensors.layout import Placement, Replicate, Shard
from common.tensors.make import from_root
from common.tensors.manager.mpi_manager import MPIManager
from common.tensors.manager.tensor_distributor import TensorDistributor, Whole, tensors_of_root
from common.tensors.tensor import DistributedTensor

Place = Callable[[Sequence[int]], Placement]  # how an operand of a shape lies before the operation


def _rows(shape: Sequence[int]) -> Placement:
    return Shard(0) if shape else Replicate()


def _batches(shape: Sequence[int]) -> Placement:
    return Shard(0) if len(shape) == 3 else Replicate()


def _whole(shape: Sequence[int]) -> Placement:
    return Replicate()


def _longest(shape: Sequence[int]) -> Placement:
    return Shard(max(range(len(shape)), key=lambda d: shape[d])) if shape else Replicate()


def _on_root(
    name: str,
    operation: Callable[..., DistributedTensor],
    operands: Sequence[Whole],
    places: Sequence[Place],
    mpi: MPIManager,
    distributor: TensorDistributor,
) -> Tensor | None:
    """Spread the operands of rank 0, apply the operation, and return the result on rank 0."""
    split = []
    for i, (whole, place) in enumerate(zip(tensors_of_root(mpi, operands), places, strict=True)):
        if whole is None:
            raise UsageError(f"{name}: rank 0 gives no tensor as operand {i}; it must give all of them")
        mine = whole.to(mpi.device) if mpi.is_master_process() else None
        split.append(from_root(mine, distributor.grid, place(whole.shape)))
    with torch.no_grad():
        return operation(*split).on_root()


def distributed_matmul(A: Whole, B: Whole, mpi: MPIManager, distributor: TensorDistributor) -> Tensor | None:
    """Return A @ B of [M, K] and [K, N]: rank 0 sends rows of A, and all of B."""
    return _on_root("distributed_matmul", products.matmul, (A, B), (_rows, _whole), mpi, distributor)


def distributed_batch_matmul(
    A: Whole, B: Whole, mpi: MPIManager, distributor: TensorDistributor
) -> Tensor | None:
    """Return the products of [b, M, K] and [b, K, N], or [K, N] for all of them: each rank takes some of the batch."""
    return _on_root("distributed_batch_matmul", products.bmm, (A, B), (_rows, _batches), mpi, distributor)


def distributed_transpose(
    A: Whole, mpi: MPIManager, distributor: TensorDistributor, dim0: int = 0, dim1: int = 1
) -> Tensor | None:
    """Return A with two dimensions exchanged."""
    return _on_root(
        "distributed_transpose", lambda a: a.transpose(dim0, dim1), (A,), (_longest,), mpi, distributor
    )


def distributed_add(A: Whole, B: Whole, mpi: MPIManager, distributor: TensorDistributor) -> Tensor | None:
    """Return A + B of equal shapes."""

    def add(a: DistributedTensor, b: DistributedTensor) -> DistributedTensor:
        if a.shape != b.shape:
            raise UsageError(f"distributed_add: shapes {list(a.shape)} and {list(b.shape)} must be equal")
        return a + b

    return _on_root("distributed_add", add, (A, B), (_longest, _longest), mpi, distributor)


def _convolution(
    name: str,
    operation: Callable[..., DistributedTensor],
    input: Whole,
    weight: Whole,
    bias: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
) -> Tensor | None:
    def batch_or_height(shape: Sequence[int]) -> Placement:
        return Shard(0 if shape[0] >= mpi.get_size() or len(shape) < 3 else 2)

    operands: list[Whole] = [input, weight]
    if mpi.broadcast(bias is not None):
        operands.append(bias)
    places = (batch_or_height, _whole, _whole)[: len(operands)]
    return _on_root(name, operation, operands, places, mpi, distributor)


def distributed_conv2d(
    input: Whole,
    weight: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    bias: Whole = None,
    stride: int | Sequence[int] = (1, 1),
    padding: int | Sequence[int] = (0, 0),
    dilation: int | Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor | None:
    """Return torch's conv2d of [N, C, H, W] and [O, C / groups, kH, kW].

    Split along the batch, or along H with halos where there are fewer samples than ranks.
    """

    def convolve(
        x: DistributedTensor, w: DistributedTensor, b: DistributedTensor | None = None
    ) -> DistributedTensor:
        return convolution.conv2d(x, w, b, stride, padding, dilation, groups)

    return _convolution("distributed_conv2d", convolve, input, weight, bias, mpi, distributor)


def distributed_conv3d(
    input: Whole,
    weight: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    bias: Whole = None,
    stride: int | Sequence[int] = (1, 1, 1),
    padding: int | Sequence[int] = (0, 0, 0),
    dilation: int | Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Tensor | None:
    """Return torch's conv3d of [N, C, D, H, W]: split along the batch, or along D with halos."""

    def convolve(
        x: DistributedTensor, w: DistributedTensor, b: DistributedTensor | None = None
    ) -> DistributedTensor:
        return convolution.conv3d(x, w, b, stride, padding, dilation, groups)

    return _convolution("distributed_conv3d", convolve, input, weight, bias, mpi, distributor)


def _transform(
    name: str,
    operation: Callable[..., DistributedTensor],
    input: Whole,
    dims: Sequence[int],
    mpi: MPIManager,
    distributor: TensorDistributor,
) -> Tensor | None:
    """Split along the longest dimension that is not transformed, where there is one."""

    def place(shape: Sequence[int]) -> Placement:
        free = [d for d in range(len(shape)) if d not in [dim % len(shape) for dim in dims]]
        return Shard(max(free, key=lambda d: shape[d])) if free else _rows(shape)

    return _on_root(name, operation, (input,), (place,), mpi, distributor)


def distributed_fft(
    input: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    n: int | None = None,
    dim: int = -1,
    norm: Norm = "backward",
) -> Tensor | None:
    """Return torch.fft.fft along `dim`. norm: backward, ortho or forward."""
    return _transform(
        "distributed_fft", lambda x: fourier.fft(x, n, dim, norm), input, (dim,), mpi, distributor
    )


def distributed_ifft(
    input: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    n: int | None = None,
    dim: int = -1,
    norm: Norm = "backward",
) -> Tensor | None:
    """Return torch.fft.ifft along `dim`."""
    return _transform(
        "distributed_ifft", lambda x: fourier.ifft(x, n, dim, norm), input, (dim,), mpi, distributor
    )


def distributed_rfft(
    input: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    n: int | None = None,
    dim: int = -1,
    norm: Norm = "backward",
) -> Tensor | None:
    """Return torch.fft.rfft of real numbers along `dim`."""
    return _transform(
        "distributed_rfft", lambda x: fourier.rfft(x, n, dim, norm), input, (dim,), mpi, distributor
    )


def distributed_fft2d(
    input: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    s: Sequence[int] | None = None,
    dim: Sequence[int] = (-2, -1),
    norm: Norm = "backward",
) -> Tensor | None:
    """Return torch.fft.fft2 along two dimensions."""
    return _transform(
        "distributed_fft2d", lambda x: fourier.fft2(x, s, dim, norm), input, dim, mpi, distributor
    )


def distributed_einsum(
    equation: str,
    *operands: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    optimize: Literal["auto", "optimal", "dp", "greedy"] = "auto",
    use_opt_einsum: bool = True,
) -> Tensor | None:
    """Return torch.einsum. use_opt_einsum: False contracts the operands from left to right."""
    path = optimize if use_opt_einsum else False
    return _on_root(
        "distributed_einsum",
        lambda *x: contraction.einsum(equation, *x, optimize=path),
        operands,
        [_longest] * len(operands),
        mpi,
        distributor,
    )


def distributed_tensordot(
    a: Whole, b: Whole, dims: int, mpi: MPIManager, distributor: TensorDistributor
) -> Tensor | None:
    """Return torch.tensordot over the last `dims` dimensions of a and the first of b."""
    return _on_root(
        "distributed_tensordot",
        lambda x, y: contraction.tensordot(x, y, dims),
        (a, b),
        (_rows, _whole),
        mpi,
        distributor,
    )


Dims = int | Sequence[int] | None


def distributed_sum(
    tensor: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    dim: Dims = None,
    keepdim: bool = False,
) -> Tensor | None:
    """Return the sum along dimensions; None: of all numbers."""
    return _on_root(
        "distributed_sum", lambda x: reductions.sum(x, dim, keepdim), (tensor,), (_longest,), mpi, distributor
    )


def distributed_mean(
    tensor: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    dim: Dims = None,
    keepdim: bool = False,
) -> Tensor | None:
    """Return the mean along dimensions; None: of all numbers."""
    return _on_root(
        "distributed_mean",
        lambda x: reductions.mean(x, dim, keepdim),
        (tensor,),
        (_longest,),
        mpi,
        distributor,
    )


def distributed_max(
    tensor: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    dim: Dims = None,
    keepdim: bool = False,
) -> Tensor | None:
    """Return the largest numbers along dimensions; None: of all numbers."""
    return _on_root(
        "distributed_max", lambda x: reductions.max(x, dim, keepdim), (tensor,), (_longest,), mpi, distributor
    )


def distributed_min(
    tensor: Whole,
    mpi: MPIManager,
    distributor: TensorDistributor,
    dim: Dims = None,
    keepdim: bool = False,
) -> Tensor | None:
    """Return the smallest numbers along dimensions; None: of all numbers."""
    return _on_root(
        "distributed_min", lambda x: reductions.min(x, dim, keepdim), (tensor,), (_longest,), mpi, distributor
    )
