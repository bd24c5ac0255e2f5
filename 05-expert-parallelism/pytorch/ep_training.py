"""What the lessons of chapter 05 share: their options, the experts of a model, what its routers say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common import comm
from common.comm import sizes_of
from common.equality import largest
from common.errors import UsageError
from common.models.moe import MoE, Routing
from common.models.transformer import TransformerConfig
from common.options import Size
from common.runtime import Runtime
from common.training import TrainingOptions


@dataclass
class ExpertOptions(TrainingOptions):
    """Model and batch of the lessons of chapter 05."""

    model: str = "mixtral-tiny"
    """A name of common/models/configs.py, of a model with experts."""
    batch: Size = 16
    """Samples of the global batch; ranks take parts that differ by one sample at the most."""

    def model_config(self) -> TransformerConfig:
        """The model's shape. Raises UsageError where it has no experts."""
        c = super().model_config()
        if not c.experts:
            raise UsageError(f"--model {self.model} has no experts; mixtral-tiny and switch-tiny have 8")
        return c


def mixtures(model: nn.Module) -> list[MoE]:
    """The mixtures of experts of a model, from the first layer to the last."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def observed(model: nn.Module) -> list[list[Routing]]:
    """For each mixture a list, to which every forward pass adds what its router said."""
    lists: list[list[Routing]] = []
    for moe in mixtures(model):
        lists.append([])
        moe.observe = lists[-1].append
    return lists


def drain(lists: list[list[Routing]]) -> Iterator[list[Routing]]:
    """What was observed, layer by layer; the lists are empty afterwards."""
    for routings in lists:
        yield list(routings)
        routings.clear()


def load(experts_BSK: Tensor, E: int) -> Tensor:
    """How many choices fell on each expert, int64 [E]."""
    return torch.bincount(experts_BSK.flatten(), minlength=E)


def check_micro_batches(rt: Runtime, o: TrainingOptions) -> None:
    """Raises UsageError where ranks would run different numbers of micro-batches: they meet in each one."""
    if o.batch // rt.world_size < o.micro_batches:
        raise UsageError(
            f"--batch {o.batch} gives a rank {o.batch // rt.world_size} samples, too few for {o.micro_batches} "
            f"micro-batches; give at least --batch {rt.world_size * o.micro_batches}"
        )


def part_of_rank(x_EN: Tensor, rt: Runtime) -> Tensor:
    """The rows of this rank's experts."""
    parts: tuple[Tensor, ...] = x_EN.split(sizes_of(len(x_EN), rt.world_size))
    return parts[rt.rank]


def largest_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], rt: Runtime) -> float:
    """The largest relative difference of one device's tensors to all ranks'; of experts `found` has this rank's.

    Infinite where something is missing or no number.
    """
    mine = {
        name: x if name not in found or x.shape == found[name].shape else part_of_rank(x, rt)
        for name, x in expected.items()
    }
    return max(comm.everyones(largest(mine, found, "").value, rt.world))
