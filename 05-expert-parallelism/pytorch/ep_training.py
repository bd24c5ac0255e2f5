"""Shared code of the lessons of chapter 05: options, the experts of a model, the choices of its routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common import comm
from common.comm import sizes_of
from common.errors import UsageError
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.equality import largest
from common.lesson.training import TrainingOptions
from common.models.moe import MoE, Routing
from common.models.transformer import TransformerConfig


@dataclass
class ExpertOptions(TrainingOptions):
    """Model and batch of the lessons of chapter 05."""

    model: str = "mixtral-tiny"
    """Name of a model with experts in common/models/configs.py."""
    batch: Size = 16
    """Samples of the global batch; the parts of the ranks differ by at most one sample."""

    def model_config(self) -> TransformerConfig:
        """Return the model's shape. Raises UsageError for a model without experts."""
        c = super().model_config()
        if not c.experts:
            raise UsageError(f"--model {self.model} has no experts; mixtral-tiny and switch-tiny have 8")
        return c


def mixtures(model: nn.Module) -> list[MoE]:
    """Return the mixtures of experts of a model, from the first layer to the last."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def observed(model: nn.Module) -> list[list[Routing]]:
    """Return one list per mixture, to which every forward pass appends the router's result."""
    lists: list[list[Routing]] = []
    for moe in mixtures(model):
        lists.append([])
        moe.observe = lists[-1].append
    return lists


def drain(lists: list[list[Routing]]) -> Iterator[list[Routing]]:
    """Yield the observed routings, layer by layer, and empty the lists."""
    for routings in lists:
        yield list(routings)
        routings.clear()


def load(experts_BSK: Tensor, E: int) -> Tensor:
    """Return the number of choices of each expert, int64 [E]."""
    return torch.bincount(experts_BSK.flatten(), minlength=E)


def check_micro_batches(rt: Runtime, o: TrainingOptions) -> None:
    """Raise UsageError if ranks would run different numbers of micro-batches: all communicate in each one."""
    if o.batch // rt.world_size < o.micro_batches:
        raise UsageError(
            f"--batch {o.batch} gives a rank {o.batch // rt.world_size} samples, too few for {o.micro_batches} "
            f"micro-batches; give at least --batch {rt.world_size * o.micro_batches}"
        )


def part_of_rank(x_EN: Tensor, rt: Runtime) -> Tensor:
    """Return the rows of this rank's experts."""
    parts: tuple[Tensor, ...] = x_EN.split(sizes_of(len(x_EN), rt.world_size))
    return parts[rt.rank]


def largest_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], rt: Runtime) -> float:
    """Return the largest relative difference of all ranks' tensors, `found`, to one device's.

    Of the experts, `found` holds this rank's. The difference is infinite where a tensor is missing or not
    finite.
    """
    mine = {
        name: x if name not in found or x.shape == found[name].shape else part_of_rank(x, rt)
        for name, x in expected.items()
    }
    return max(comm.everyones(largest(mine, found, "").value, rt.world))
