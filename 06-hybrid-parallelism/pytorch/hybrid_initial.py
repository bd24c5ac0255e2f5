"""Initial values for a model on the meta device: each rank makes its shard of every parameter, one at a time.

The strategies split a model on torch's "meta" device, where a tensor has a shape and no values. The shard is
then a function of (seed, name, position): the same seed gives the same model on every mesh, and beside its
own shards a rank holds only the one whole parameter that it is cutting.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.comm.mesh import Mesh
from common.comm.placement import like, piece, whole_shape
from common.models.transformer import Transformer, initial_value

Whole = Callable[[str, torch.Size], Tensor]  # the value of a parameter of the whole model


def materialise(model: Transformer, mesh: Mesh, device: torch.device, whole: Whole) -> None:
    """Give each parameter of `model` its shard of whole(name, shape); buffers without values get zeros."""
    for path, module in model.named_modules():
        for short, parameter in list(module.named_parameters(path, recurse=False)):
            numbers = whole(short, whole_shape(parameter, mesh))
            mine = piece(numbers, parameter, mesh).to(device, parameter.dtype, copy=True)
            setattr(module, short.rpartition(".")[2], like(mine.contiguous(), parameter))
        for short, buffer in list(module.named_buffers(recurse=False)):
            there = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            setattr(module, short, there)


def from_seed(model: Transformer, seed: int) -> Whole:
    """Return whole(name, shape) with the plain model's initial values."""
    return lambda name, shape: initial_value(name, shape, model.config, seed)
