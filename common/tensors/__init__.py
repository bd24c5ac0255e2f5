"""Distributed tensors: plain tensors that are split over ranks, and operations whose results stay split."""

from common.errors import UsageError
from common.tensors.contraction import einsum, expression, tensordot
from common.tensors.convolution import conv1d, conv2d, conv3d
from common.tensors.explain import explain
from common.tensors.fourier import (
    fft,
    fft2,
    fftn,
    ifft,
    ifft2,
    ifftn,
    irfft,
    irfft2,
    irfftn,
    rfft,
    rfft2,
    rfftn,
)
from common.tensors.grid import Grid
from common.tensors.layout import Layout, Partial, Replicate, Shard
from common.tensors.make import (
    from_dtensor,
    from_full,
    from_function,
    from_pieces,
    from_root,
    full,
    load,
    normal,
    to_dtensor,
    uniform,
)
from common.tensors.products import bmm, matmul
from common.tensors.rates import Rates
from common.tensors.tensor import DistributedTensor, pointwise

__all__ = [
    "DistributedTensor",
    "Grid",
    "Layout",
    "Partial",
    "Rates",
    "Replicate",
    "Shard",
    "UsageError",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "einsum",
    "explain",
    "expression",
    "fft",
    "fft2",
    "fftn",
    "from_dtensor",
    "from_full",
    "from_function",
    "from_pieces",
    "from_root",
    "full",
    "ifft",
    "ifft2",
    "ifftn",
    "irfft",
    "irfft2",
    "irfftn",
    "load",
    "matmul",
    "normal",
    "pointwise",
    "rfft",
    "rfft2",
    "rfftn",
    "tensordot",
    "to_dtensor",
    "uniform",
]
