"""Numbers for a model that has only shapes: each rank makes its own piece of every parameter, one at a time.

The strategies cut a model on torch's "meta" device, where a tensor is a shape. Then a piece is a function of
(seed, name, place): the same seed gives the same model on every mesh, and of what is not its own a rank never holds
more than the one parameter that it is cutting.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from common.mesh import Mesh
from common.models.transformer import Transformer, initial_value
from common.placement import like, piece, whole_shape

Whole = Callable[[str, torch.Size], Tensor]  # the value of a parameter of the whole model


def materialise(model: Transformer, mesh: Mesh, device: torch.device, whole: Whole) -> None:
    """Give each parameter of `model` its piece of whole(name, shape); buffers that have no numbers get zeros."""
    for path, module in model.named_modules():
        for short, parameter in list(module.named_parameters(path, recurse=False)):
            numbers = whole(short, whole_shape(parameter, mesh))
            mine = piece(numbers, parameter, mesh).to(device, parameter.dtype, copy=True)
            setattr(module, short.rpartition(".")[2], like(mine.contiguous(), parameter))
        for short, buffer in list(module.named_buffers(recurse=False)):
            there = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            setattr(module, short, there)


def from_seed(model: Transformer, seed: int) -> Whole:
    """The values with which the plain model starts."""
    return lambda name, shape: initial_value(name, shape, model.config, seed)
